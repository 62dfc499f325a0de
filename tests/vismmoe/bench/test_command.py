"""The command on a tiny model, each arm in a process of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from vismmoe.bench import command
from vismmoe.bench.arm import ArmResult, ArmSpec, run
from vismmoe.bench.cap import MemoryCap
from vismmoe.bench.command import bench, bench_report
from vismmoe.bench.comparison import ArmError, measure
from vismmoe.bench.replay import Replay
from vismmoe.bench.systems import copy_for_accelerate
from vismmoe.config import BenchConfig, PlanConfig
from vismmoe.engine import plan_for
from vismmoe.models.checkpoint import open_checkpoint


@pytest.fixture
def photo(picture: Image.Image, tmp_path: Path) -> str:
    picture.save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def in_this_process(spec: ArmSpec, cap: MemoryCap | None, work: Path, files: Sequence[Path]) -> ArmResult:
    """An arm without the seconds that a process of its own takes to import torch."""
    results = io.StringIO()
    run(spec, results)
    return ArmResult(**json.loads(results.getvalue()))


def test_all_arms_stand_side_by_side(tiny_checkpoint: Path, photo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_measure", in_this_process)
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint), device="cpu"))
    half = (plan.minimum_bytes + plan.all_resident_bytes) // 2
    report = bench(
        BenchConfig(
            model=str(tiny_checkpoint), device_memory=half, image=photo, max_new_tokens=4, repeats=2,
            baseline=("resident", "mmap"),
        )
    )  # fmt: skip
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["resident", "mmap", "lru", "next-gate", "own-limit"]
    assert all(row["decode_tokens_per_s"] > 0 and row["prefill_s"] > 0 for row in rows.values())
    assert all(len(each) == 2 for each in report["rounds"].values())
    assert "own-limit" in bench_report(report)


def test_accelerate_reads_its_copy_and_answers(tiny_checkpoint: Path, tmp_path: Path, photo: str) -> None:
    pytest.importorskip("accelerate")
    copy_for_accelerate(open_checkpoint(tiny_checkpoint), tmp_path / "copies")
    spec = ArmSpec(
        "accelerate-disk",
        str(tiny_checkpoint),
        photo,
        1,
        "What is this?",
        3,
        None,
        None,
        copies=str(tmp_path / "copies"),
    )
    assert in_this_process(spec, None, tmp_path, []).tokens == 3


def test_a_replay_decides_what_every_system_runs(tiny_checkpoint: Path, tmp_path: Path, photo: str) -> None:
    spec = open_checkpoint(tiny_checkpoint).spec
    layers, experts, k = len(spec.moe_layers), spec.num_experts, spec.top_k
    chosen = torch.arange(k).expand(3, layers, k)  # every decoded token takes the first k experts of each layer
    counts = torch.zeros(layers, experts, dtype=torch.int64)
    counts[:, :k] = 5
    replay = Replay(counts, chosen.contiguous(), torch.full((3, layers, k), 1 / k), {})
    replay.save(tmp_path / "replay.safetensors")
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint), device="cpu", prefix_layers=0))
    arm = ArmSpec(
        "lru", str(tiny_checkpoint), photo, 1, "What is this?", 4, plan.all_resident_bytes - 1, 0,
        replay=str(tmp_path / "replay.safetensors"),
    )  # fmt: skip
    assert in_this_process(arm, None, tmp_path, []).hit_rate == 1.0  # the prefill has brought what decode needs


def test_an_arm_that_cannot_run_is_told_by_name(tiny_checkpoint: Path, tmp_path: Path) -> None:
    spec = ArmSpec("lru", str(tiny_checkpoint / "nowhere"), "", 1, "?", 2, None, None)
    with pytest.raises(ArmError, match="lru"):
        measure(spec, None, tmp_path, [])


def test_a_cap_lets_a_program_run_and_leaves_nothing_behind() -> None:
    with MemoryCap.make(1 << 30) as cap:
        assert cap.run(["/bin/echo", "hello"], 60).stdout == "hello\n"
    assert cap.folder is None or not cap.folder.exists()
