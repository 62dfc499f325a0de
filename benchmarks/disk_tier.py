"""Experts on disk, one memory cap for all: Accelerate, memory mapping and ours, side by side, with two limits.

    python benchmarks/disk_tier.py --layers 4 --cap 2.5GiB --json disk_tier.json

A checkpoint with the true shapes of Qwen3-VL-30B-A3B is generated (true_shapes.py; 1.2 GB a layer, 1.2 GB for the
rest, and as much again for the copy that Accelerate makes) and kept in --work for later runs. Its routers are replaced
in all arms alike by what the reference model's routers did in a conversation (conversation.py). docs/benchmarks.md says
what each column means.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vismmoe.bench.arm import ArmResult, ArmSpec
from vismmoe.bench.cap import MemoryCap
from vismmoe.bench.comparison import (
    ArmError,
    belady_limit,
    goals,
    measure,
    median,
    own_limit,
    rounds,
    row_of,
    rows_table,
)
from vismmoe.bench.disk import direct_rate
from vismmoe.config import REFERENCE_MODEL, in_clone, resolve_model
from vismmoe.errors import UsageError
from vismmoe.failures import guarded, quieten
from vismmoe.sizes import format_size, parse_size

ARMS = ("accelerate-disk", "mmap", "lru", "next-gate", "predictor")
PROCESS_BYTES = 800 << 20  # Python, torch and transformers (450 MB measured), kernels, what exceeds the plan, some air


def main(words: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(words)
    quieten()
    return guarded("disk_tier", lambda: _main(given), given.debug)


def _main(given: argparse.Namespace) -> int:
    started = time.monotonic()
    work = Path(given.work)
    model, specs, replay = _prepare(given, work)
    cap_bytes = parse_size(given.cap)
    files = sorted(model.glob("*.safetensors")) + sorted((work / f"copies-{given.layers}").glob("*.dat"))
    rate = direct_rate(model / "layer-0.safetensors", EXPERT_BYTES, threads=(1, 2, 3, 4))
    _say(f"direct reads of one expert's size: {rate / 1e9:.2f} GB/s")
    with MemoryCap.make(cap_bytes) as cap:
        _say(f"cap {format_size(cap_bytes)}: {cap.kind}")

        def run(spec: ArmSpec) -> ArmResult:
            return measure(spec, None if spec.name == "resident" else cap, work, files)

        def note(found: dict[str, list[ArmResult]]) -> None:
            """An interrupted run leaves the rounds that it has finished."""
            report = _report(given, found, replay, rate, cap.kind, time.monotonic() - started)
            if given.json:
                Path(given.json).write_text(json.dumps(report, indent=1) + "\n")

        found = rounds(specs, given.rounds, run, _say, note)
        halves = None if given.skip_first_token else _first_tokens(specs, run, given.first_token_scale)
    report = _report(given, found, replay, rate, cap.kind, time.monotonic() - started)
    if halves is not None:
        report["first_token"] = halves
    print(_table(report))
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1) + "\n")
    if given.clean:
        shutil.rmtree(work, ignore_errors=True)
    return 0


EXPERT_BYTES = 3 * 768 * 2048 * 2


def _prepare(given: argparse.Namespace, work: Path) -> tuple[Path, list[ArmSpec], Any]:
    """Checkpoint, replay and Accelerate's copy, made where an earlier run has not left them."""
    from conversation import first_scene, write_replay
    from true_shapes import PIXELS_PER_TOKEN_RATIO, write_checkpoint

    from vismmoe.bench.replay import Replay
    from vismmoe.bench.systems import copy_for_accelerate
    from vismmoe.models.checkpoint import open_checkpoint

    corpus = in_clone("datasets/scenes")
    if corpus is None:
        raise UsageError("datasets/scenes is missing: run this from a clone of the project.")
    work.mkdir(parents=True, exist_ok=True)
    reference = resolve_model(REFERENCE_MODEL)
    model = write_checkpoint(work / f"model-{given.layers}", Path(reference), given.layers)
    _say(f"checkpoint: {model}")
    replay = write_replay(work, reference, corpus, given.layers, given.tokens, given.images, given.epochs)
    arms = ["resident", *given.arms]
    copies = work / f"copies-{given.layers}"
    if "accelerate-disk" in arms:
        copy_for_accelerate(open_checkpoint(model), copies)
    scene = first_scene(corpus)
    base = ArmSpec(
        name="", model=str(model), image=str(scene.image), image_scale=PIXELS_PER_TOKEN_RATIO, prompt=scene.prompt,
        tokens=given.tokens, device_memory=parse_size(given.cap) - PROCESS_BYTES, prefix_layers=0,
        readers=given.readers, replay=str(replay), copies=str(copies), vision=given.vision,
    )  # fmt: skip
    specs = [replace(base, name=name) for name in arms]
    short = min(given.tokens, given.accelerate_tokens)
    specs = [replace(spec, tokens=short) if spec.name == "accelerate-disk" else spec for spec in specs]
    return model, specs, Replay.load(replay)


def _first_tokens(specs: Sequence[ArmSpec], run: Any, scale: int) -> dict[str, Any] | None:
    """Time to the first token with all and with half of the visual tokens, the first layer pinned. scale: of the
    picture's sides beyond the other arms'."""
    ours = {spec.name: spec for spec in specs}
    base = next((ours[name] for name in ("predictor", "next-gate", "lru") if name in ours), None)
    if base is None:
        return None
    base = replace(base, image_scale=base.image_scale * scale)
    told: dict[str, Any] = {"arm": base.name, "image_scale": base.image_scale}
    for ratio in (1.0, 0.5):
        try:
            found = [run(replace(base, prefix_layers=1, keep_ratio=ratio, tokens=2)).prefill_s for _ in range(2)]
        except ArmError as error:
            return {"failed": str(error)}
        told[f"keep_{ratio:g}_s"] = round(statistics.median(found), 3)
    return told | {"ratio": round(told["keep_0.5_s"] / told["keep_1_s"], 3)}


def _report(
    given: argparse.Namespace,
    found: dict[str, list[ArmResult]],
    replay: Any,
    rate: float,
    cap_kind: str,
    seconds: float,
) -> dict[str, Any]:
    medians = {name: median(results) for name, results in found.items()}
    resident = medians["resident"]
    rows = {name: row_of(name, medians[name], resident) for name in given.arms}
    best = next((name for name in ("predictor", "next-gate", "lru") if name in medians), None)
    if best is not None:
        ours, expert = medians[best], EXPERT_BYTES
        rows["own-limit"] = own_limit(ours, resident, rate)
        rows["belady-limit"] = belady_limit(replay.visits(), given.layers, expert, ours, resident, rate)
    return {
        "machine": _machine(rate),
        "settings": {
            "layers": given.layers, "cap_bytes": parse_size(given.cap), "cap": cap_kind, "tokens": given.tokens,
            "accelerate_tokens": min(given.tokens, given.accelerate_tokens), "rounds": given.rounds,
            "readers": given.readers,
        },
        "rows": [row.to_json() for row in rows.values()],
        "ratios": goals(rows),
        "resident": row_of("resident", resident, resident).to_json(),
        "details": {name: _detail(result) for name, result in medians.items()},
        "rounds": {name: [round(each.decode_tokens_per_s, 3) for each in results] for name, results in found.items()},
        "seconds": round(seconds),
        "load": {name: _load(medians[name], rate) for name in ("lru", "next-gate", "predictor") if name in medians},
    }  # fmt: skip


def _detail(result: ArmResult) -> dict[str, Any]:
    return {
        "decode_p50_ms": round(result.decode_p50_ms, 2),
        "decode_p95_ms": round(result.decode_p95_ms, 2),
        "prefill_bytes": result.prefill_bytes,
        "decode_bytes": result.decode_bytes,
        "prefill_stall_ms": round(result.prefill_stall_ms, 1),
        "hit_rate": result.hit_rate,
        "slabs": result.slabs,
        "planned_bytes": result.planned_bytes,
        "peak_bytes": result.peak_bytes,
    }


def _load(result: ArmResult, rate: float) -> dict[str, float]:
    """From an idle process to the first token, against what the disk needs for the bytes that were read meanwhile."""
    took = result.load_s + result.prefill_s
    disk = (result.load_bytes + result.prefill_bytes) / rate
    return {"first_token_s": round(took, 3), "disk_s": round(disk, 3), "ratio": round(took / disk, 3)}


def _machine(rate: float) -> dict[str, Any]:
    import torch

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": model, "cpus": os.cpu_count(), "amx_bf16": bool(torch.cpu._is_amx_tile_supported()),
        "torch": torch.__version__, "direct_read_bytes_per_s": round(rate),
        "load_average": round(os.getloadavg()[0], 2),
        "commit": _commit(),
    }  # fmt: skip


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _table(report: dict[str, Any]) -> str:
    from vismmoe.bench.comparison import Row

    lines = [rows_table([Row(**row) for row in (*report["rows"], report["resident"])]), ""]
    lines += report["ratios"]
    lines += [
        f"load, {name}: first token after {told['first_token_s']:.2f} s; the disk needs {told['disk_s']:.2f} s "
        f"for what was read until then: {told['ratio']:.2f}"
        for name, told in report["load"].items()
    ]
    if "ratio" in (report.get("first_token") or {}):
        told = report["first_token"]
        lines.append(
            f"first token at half of the visual tokens: {told['keep_0.5_s']} s of {told['keep_1_s']} s: {told['ratio']}"
        )
    return "\n".join(lines)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="decoder layers (default: %(default)s)")
    parser.add_argument("--cap", default="2.5GiB", metavar="SIZE", help="memory of each arm (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="default: all")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="to generate (default: %(default)s)")
    parser.add_argument(
        "--accelerate-tokens", type=int, default=6, metavar="N", help="it takes seconds a token (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--readers", type=int, default=2, metavar="N", help="threads that read (default: %(default)s)")
    parser.add_argument(
        "--vision", choices=("resident", "streamed"), default="streamed", help="ours: the tower (default: %(default)s)"
    )
    parser.add_argument(
        "--images", type=int, default=120, help="pictures to train the predictor on (default: %(default)s)"
    )
    parser.add_argument("--epochs", type=int, default=12, help="of that training, at most (default: %(default)s)")
    parser.add_argument(
        "--first-token-scale", type=int, default=1, metavar="N",
        help="of the picture's sides in these runs: N * N times the visual tokens (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--skip-first-token", action="store_true", help="leave the runs at half of the tokens out")
    parser.add_argument(
        "--work", default=str(Path(tempfile.gettempdir()) / "vismmoe-disk-tier"), metavar="DIR",
        help="folder for what is generated (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--clean", action="store_true", help="delete that folder at the end")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


if __name__ == "__main__":
    sys.exit(main())
