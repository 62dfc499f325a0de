from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import vismmoe_deploy
from vismmoe import commands
from vismmoe.config import EngineConfig, InferConfig, PlanConfig
from vismmoe.errors import ImageError
from vismmoe.request import Request

PHASE = dict.fromkeys(
    ("accesses", "hits", "demand_loads", "cpu_runs", "prefetched", "prefetched_used", "bytes_loaded", "stall_ms"), 0
)
REPORT: dict[str, Any] = {
    "text": "three",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 9, "visual_tokens": 4, "kept_visual_tokens": 4, "completion_tokens": 2},
    "timing_ms": {"prefill": 1.0, "decode_p50": 1.0, "total": 2.0},
    "tokens_per_second": 1.0,
    "experts": {"prefill": PHASE, "decode": PHASE, "evictions": 0, "slabs": 0, "pinned_layers": 3},
    "memory": dict.fromkeys(("device_planned_bytes", "device_peak_bytes", "host_planned_bytes", "host_peak_bytes"), 0),
    "predictor": None,
    "fallbacks": [],
}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What load_engine and generate were called with; the engine says `three` in two pieces."""
    calls: list[tuple[Any, ...]] = []

    def generate(request: Any, on_text: Callable[[str], None] | None) -> SimpleNamespace:
        calls.append((request,))
        if on_text is not None:
            on_text("thr")
            on_text("ee")
        return SimpleNamespace(to_json=lambda: REPORT)

    @contextmanager
    def load(
        config: EngineConfig, predictor: str | None = None, *, request: Request | None = None
    ) -> Iterator[SimpleNamespace]:
        calls.append((config, predictor))
        yield SimpleNamespace(generate=generate)

    monkeypatch.setattr(vismmoe_deploy, "load_engine", load)
    return calls


@pytest.fixture
def photo(tmp_path: Path) -> str:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "photo.png")
    return str(tmp_path / "photo.png")


def test_infer_prints_the_answer_alone_and_its_report_on_stderr(
    loaded: list[Any], photo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = io.StringIO()
    commands.infer(InferConfig(prompt="How many?", image=(photo,), keep_ratio=0.5, predictor="folder"), results)
    assert results.getvalue() == "three\n"
    assert "4 visual" in capsys.readouterr().err
    (config, predictor), (request,) = loaded
    assert (config.keep_ratio, predictor) == (0.5, "folder")
    assert (request.prompt, request.keep_ratio, request.compressor, len(request.images)) == (
        "How many?", 0.5, "affinity-bytes", 1,
    )  # fmt: skip


def test_infer_json_is_one_object_and_nothing_else(
    loaded: list[Any], photo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    results = io.StringIO()
    commands.infer(InferConfig(prompt="How many?", image=(photo,), json=True), results)
    assert json.loads(results.getvalue()) == REPORT
    assert capsys.readouterr() == ("", "")


def test_a_streamed_answer_is_printed_once(loaded: list[Any], photo: str) -> None:
    results = io.StringIO()
    commands.infer(InferConfig(prompt="How many?", image=(photo,), stream=True), results)
    assert results.getvalue() == "three\n"


def test_a_bad_image_is_told_before_any_model_is_loaded(loaded: list[Any], tmp_path: Path) -> None:
    (tmp_path / "page.jpg").write_text("<html>not an image</html>")
    with pytest.raises(ImageError, match=r"page\.jpg"):
        commands.infer(InferConfig(prompt="x", image=(str(tmp_path / "page.jpg"),)), io.StringIO())
    assert loaded == []


def test_plan_json_has_what_scripts_read(tiny_checkpoint: Path) -> None:
    results = io.StringIO()
    commands.plan(PlanConfig(model=str(tiny_checkpoint), device="cpu", json=True), results)
    plan = json.loads(results.getvalue())
    assert {"device", "host", "disk", "pinned_layers", "slabs", "cycle_slabs", "warnings"} <= set(plan)
    assert plan["device"]["minimum_bytes"] < plan["device"]["all_resident_bytes"]
    assert sum(plan["device"]["planned"].values()) <= plan["device"]["all_resident_bytes"]


def test_plan_for_people_shows_the_same_numbers(tiny_checkpoint: Path) -> None:
    asked = {"model": str(tiny_checkpoint), "device": "cpu"}
    as_json, as_text = io.StringIO(), io.StringIO()
    commands.plan(PlanConfig(**asked, json=True), as_json)  # type: ignore[arg-type]
    commands.plan(PlanConfig(**asked), as_text)  # type: ignore[arg-type]
    assert f"{json.loads(as_json.getvalue())['device']['minimum_bytes']:,}" in as_text.getvalue()
