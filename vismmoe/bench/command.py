"""`vismmoe bench`: one question, answered by ours and by what else is asked for, each in a process of its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vismmoe.bench.arm import ArmResult, ArmSpec
from vismmoe.bench.cap import MemoryCap
from vismmoe.bench.comparison import Row, goals, measure, median, own_limit, rounds, row_of, rows_table
from vismmoe.bench.disk import direct_rate
from vismmoe.config import BenchConfig, resolve_model
from vismmoe.models.checkpoint import Checkpoint, open_checkpoint

ARM_OF = {"accelerate": "accelerate-disk", "mmap": "mmap", "resident": "resident"}


def bench(config: BenchConfig) -> dict[str, Any]:
    """The report as JSON. Raises CheckpointError, CorpusError, UsageError, ArmError."""
    checkpoint = open_checkpoint(resolve_model(config.model))
    with tempfile.TemporaryDirectory(prefix="vismmoe-bench-") as name:
        work = Path(name)
        specs = _specs(config, checkpoint, work)
        with _cap(config) as cap:
            files = sorted(checkpoint.folder.glob("*.safetensors")) + sorted((work / "copies").glob("*.dat"))
            found = rounds(specs, config.repeats, lambda spec: _measure(spec, cap, work, files), _say)
    medians = {name: median(results) for name, results in found.items()}
    piece = next(iter(checkpoint.layout.ranges.values()))[0]
    rate = direct_rate(piece.file, checkpoint.layout.expert_bytes)
    rows = _rows(medians, rate)
    return {
        "model": config.model,
        "cap": "none" if cap is None else f"{config.cap} bytes: {cap.kind}",
        "direct_read_bytes_per_s": round(rate),
        "rows": [row.to_json() for row in rows.values()],
        "ratios": goals(rows),
        "rounds": {name: [round(each.decode_tokens_per_s, 3) for each in results] for name, results in found.items()},
    }


def bench_report(report: dict[str, Any]) -> str:
    """The same for people."""
    lines = [rows_table([Row(**row) for row in report["rows"]]), ""]
    lines += [f"cap: {report['cap']}; direct reads: {report['direct_read_bytes_per_s'] / 1e9:.2f} GB/s"]
    return "\n".join(lines + report["ratios"])


def _specs(config: BenchConfig, checkpoint: Checkpoint, work: Path) -> list[ArmSpec]:
    arms = [ARM_OF[name] for name in config.baseline] + ["lru", "next-gate"]
    arms += ["predictor"] if config.predictor else []
    copies = work / "copies"
    if "accelerate-disk" in arms:
        from vismmoe.bench.systems import copy_for_accelerate

        copy_for_accelerate(checkpoint, copies)
    replay = _replay(config, checkpoint, work)
    return [
        ArmSpec(
            name=name,
            model=str(checkpoint.folder),
            image=config.image or "",
            image_scale=1,
            prompt=config.prompt,
            tokens=config.max_new_tokens,
            device_memory=config.device_memory,
            prefix_layers=config.prefix_layers,
            readers=config.readers,
            vision=config.vision,
            replay=replay,
            copies=str(copies),
            predictor=config.predictor or "",
        )
        for name in dict.fromkeys(arms)
    ]


def _replay(config: BenchConfig, checkpoint: Checkpoint, work: Path) -> str:
    """File of the replay; "" when the model is to route for itself."""
    if config.routing is None:
        return ""
    from vismmoe.bench.replay import replay_of
    from vismmoe.predictors import build_predictor
    from vismmoe.simulate.foresight import Foresight, LearnedForesight, rule_foresight
    from vismmoe.trace import read_traces
    from vismmoe_deploy.resolve import resolve

    traces = read_traces([config.routing])
    foresights: dict[str, Foresight] = {"next-gate": rule_foresight("next-gate", traces)}
    if config.predictor:
        found = resolve(config.predictor, None, traces.header.spec)
        foresights["predictor"] = LearnedForesight(build_predictor(found.artifact))
    file = work / "replay.safetensors"
    replay_of(traces, len(checkpoint.spec.moe_layers), config.max_new_tokens, foresights).save(file)
    return str(file)


def _rows(medians: dict[str, ArmResult], rate: float) -> dict[str, Row]:
    resident = medians.get("resident")
    rows = {name: row_of(name, result, resident) for name, result in medians.items()}
    if resident is not None:
        best = next(name for name in ("predictor", "next-gate", "lru") if name in medians)
        rows["own-limit"] = own_limit(medians[best], resident, rate)
    return rows


def _measure(spec: ArmSpec, cap: MemoryCap | None, work: Path, files: Sequence[Path]) -> ArmResult:
    return measure(spec, None if spec.name == "resident" else cap, work, files)


@contextmanager
def _cap(config: BenchConfig) -> Iterator[MemoryCap | None]:
    if config.cap is None:
        yield None
        return
    with MemoryCap.make(config.cap) as cap:
        yield cap


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
