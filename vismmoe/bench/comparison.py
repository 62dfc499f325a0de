"""Rounds of arms in alternating order, medians, and the two limits beside them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from vismmoe.bench.arm import BASELINES, ArmResult, ArmSpec
from vismmoe.bench.cap import MemoryCap
from vismmoe.bench.disk import make_cold
from vismmoe.bench.limits import Work, belady_misses
from vismmoe.errors import VisMMoEError
from vismmoe.talk import table

ARM_LIMIT_S = 900.0
Say = Callable[[str], None]


class ArmError(VisMMoEError):
    """A measured process ended without a result."""


@dataclass(frozen=True)
class Row:
    """One line of the table; medians over the rounds."""

    name: str
    decode_tokens_per_s: float
    prefill_s: float
    bytes_read: int  # by the request, from disk
    stall_ms: float
    peak_rss_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "decode_tokens_per_s": round(self.decode_tokens_per_s, 3),
            "prefill_s": round(self.prefill_s, 3),
            "bytes_read": self.bytes_read,
            "stall_ms": round(self.stall_ms, 1),
            "peak_rss_bytes": self.peak_rss_bytes,
        }


def measure(spec: ArmSpec, cap: MemoryCap | None, folder: Path, cold: Sequence[Path]) -> ArmResult:
    """Run one arm in a process of its own, the files cold. ArmError when it ends badly."""
    file = folder / f"{spec.name}.json"
    spec.write(file)
    make_cold(cold)
    words = [sys.executable, "-m", "vismmoe.bench.arm", str(file)]
    if cap is None:
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=ARM_LIMIT_S, check=False)
    else:
        done = cap.run(words, ARM_LIMIT_S)
    if done.returncode:
        why = "it was killed, most likely at the memory cap" if done.returncode == -9 else f"status {done.returncode}"
        raise ArmError(f"The arm {spec.name} ended without a result: {why}. Raise the cap, or leave this arm out.")
    told = json.loads(done.stdout.splitlines()[-1])
    return ArmResult(**{field.name: told[field.name] for field in fields(ArmResult)})


def rounds(
    specs: Sequence[ArmSpec],
    count: int,
    run: Callable[[ArmSpec], ArmResult],
    say: Say,
    after_round: Callable[[dict[str, list[ArmResult]]], None] = lambda _: None,
) -> dict[str, list[ArmResult]]:
    """All arms `count` times, every other round in reverse order, so that a drift of the machine hits all alike.

    after_round sees what there is so far, once each arm has a result. An arm that ends
    badly in one round is measured by its other rounds; ArmError when it has none.
    """
    found: dict[str, list[ArmResult]] = {spec.name: [] for spec in specs}
    failed: dict[str, ArmError] = {}
    for number in range(count):
        for spec in specs if number % 2 == 0 else reversed(specs):
            try:
                result = run(spec)
            except ArmError as error:
                failed[spec.name] = error
                say(f"round {number + 1}: {error}")
                continue
            found[spec.name].append(result)
            say(
                f"round {number + 1}: {spec.name:<16} {result.decode_tokens_per_s:8.2f} tokens/s, first token after "
                f"{result.prefill_s:.2f} s, {(result.prefill_bytes + result.decode_bytes) / 1e9:.2f} GB read"
            )
        if all(found.values()):
            after_round(found)
    for name, results in found.items():
        if not results:
            raise failed[name]
    return found


def median(results: Sequence[ArmResult]) -> ArmResult:
    """Field by field; None stays None."""
    values: dict[str, Any] = {}
    for field in fields(ArmResult):
        held = [getattr(result, field.name) for result in results]
        values[field.name] = None if held[0] is None else statistics.median(held)
    whole = {field.name for field in fields(ArmResult) if "int" in str(field.type)}
    return replace(
        results[0],
        **{name: int(value) if name in whole and value is not None else value for name, value in values.items()},
    )


def row_of(name: str, result: ArmResult, resident: ArmResult | None) -> Row:
    """stall_ms of a system that does not tell: its time beyond the resident model's, prefill and the same tokens."""
    stall = result.stall_ms
    if stall is None:
        stall = 0.0
        if resident is not None:
            steps = result.tokens - 1
            own = result.prefill_s + steps / max(result.decode_tokens_per_s, 1e-9)
            stall = max(0.0, own - resident.prefill_s - steps / max(resident.decode_tokens_per_s, 1e-9)) * 1e3
    read = result.prefill_bytes + result.decode_bytes
    return Row(name, result.decode_tokens_per_s, result.prefill_s, read, stall, result.peak_rss_bytes)


def own_limit(ours: ArmResult, resident: ArmResult, bytes_per_s: float) -> Row:
    """The bytes that `ours` read, at the disk's direct rate, beside the resident model's arithmetic."""
    return _limit("own-limit", ours.prefill_bytes, ours.decode_bytes, ours, resident, bytes_per_s)


def belady_limit(
    visits: Sequence[Sequence[tuple[int, int]]],
    prefill_visits: int,
    expert_bytes: int,
    ours: ArmResult,
    resident: ArmResult,
    bytes_per_s: float,
) -> Row:
    """The loads of a cache with our slabs that knows the future, prefetched perfectly; cold at the start, like ours."""
    prefill, decode = belady_misses(visits, ours.slabs, prefill_visits)
    return _limit("belady-limit", prefill * expert_bytes, decode * expert_bytes, ours, resident, bytes_per_s)


def _limit(
    name: str, prefill_bytes: int, decode_bytes: int, ours: ArmResult, resident: ArmResult, bytes_per_s: float
) -> Row:
    steps = resident.tokens - 1
    prefill = Work(prefill_bytes, resident.prefill_s)
    decode = Work(decode_bytes, steps / max(resident.decode_tokens_per_s, 1e-9))
    return Row(
        name,
        steps / decode.seconds(bytes_per_s),
        prefill.seconds(bytes_per_s),
        prefill_bytes + decode_bytes,
        (prefill.stall_s(bytes_per_s) + decode.stall_s(bytes_per_s)) * 1e3,
        ours.peak_rss_bytes,
    )


def rows_table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [
        (
            row.name,
            f"{row.decode_tokens_per_s:.2f}",
            f"{row.prefill_s:.2f}",
            f"{row.bytes_read / 1e9:.2f}",
            f"{row.stall_ms:.0f}",
            f"{row.peak_rss_bytes / 2**30:.2f}",
        )
        for row in rows
    ]
    return table(lines, ("arm", "tokens/s", "first token s", "GB read", "stall ms", "peak RSS GiB"))


def goals(rows: Mapping[str, Row]) -> list[str]:
    """The predictor arm's decode rate against what else was measured, as sentences."""
    if "predictor" not in rows:
        return []
    ours = rows["predictor"].decode_tokens_per_s
    names = [*BASELINES, "own-limit", "belady-limit"]
    return [
        f"predictor / {name}: {ours / rows[name].decode_tokens_per_s:.2f}"
        for name in names
        if name in rows and rows[name].decode_tokens_per_s
    ]
