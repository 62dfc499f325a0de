"""One command answers with all tokens and with fewer; batches change nothing; a killed run goes on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vismmoe.retention as retention
from vismmoe.config import EvalConfig, PlanConfig
from vismmoe.engine import Engine, plan_for
from vismmoe.errors import UsageError

COUNT = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, make_picture: Callable[..., Image.Image]) -> Path:
    """OCRBench-shaped rows about noise; the tiny model babbles, so single letters are asked for."""
    import pyarrow
    from pyarrow import parquet

    rows = []
    for number in range(COUNT):
        held = io.BytesIO()
        make_picture(64, 48 + 16 * (number % 2), number).save(held, "PNG")
        row = {"dataset": "x", "question": f"What is {number}?", "question_type": "Doc-oriented VQA"}
        rows.append({**row, "answer": list("aeiouns")[: number + 1], "image": {"bytes": held.getvalue(), "path": None}})
    file = tmp_path_factory.mktemp("data") / "test-0.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


@pytest.fixture
def config(tiny_checkpoint: Path, data: Path) -> EvalConfig:
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint)))
    return EvalConfig(
        model=str(tiny_checkpoint),
        benchmark="ocrbench",
        data=str(data),
        keep_ratio=(0.5,),
        compressor=("affinity", "random"),
        max_new_tokens=5,
        device_memory=plan.minimum_bytes + (plan.all_resident_bytes - plan.minimum_bytes) // 4,
    )


def silent(batches: Sequence[list[int]], total: int, what: str, unit: str) -> Iterable[list[int]]:
    return batches


def run(config: EvalConfig) -> dict[str, Any]:
    return retention.run(config, lambda: Engine.load(config.engine_config()), silent)


def told(report: dict[str, Any]) -> list[Any]:
    """What does not depend on time and on what is shared."""
    names = ("name", "scores", "retention", "interval", "kept_visual_tokens", "distinct_experts")
    return [[arm[name] for name in names] for arm in report["arms"]]


def test_batches_give_the_same_answers_and_scores_and_load_less(config: EvalConfig, tmp_path: Path) -> None:
    single = run(replace(config, output=str(tmp_path / "one")))
    batched = run(replace(config, output=str(tmp_path / "four"), batch_size=4))
    assert told(single) == told(batched)
    assert [arm["name"] for arm in single["arms"]] == ["vanilla", "affinity 50 %", "random 50 %"]
    for name in ("vanilla", "affinity-0.5", "random-0.5"):
        one, four = (
            [json.loads(line) for line in (tmp_path / which / f"{name}.samples.jsonl").read_text().splitlines()]
            for which in ("one", "four")
        )
        assert one == four
        assert [line["prediction"] for line in one] != [""] * COUNT
        assert {"question", "answer", "prompt", "prediction", "score"} <= set(one[0])
    for one_arm, other in zip(single["arms"], batched["arms"], strict=True):
        assert other["bytes_loaded"] < 0.7 * one_arm["bytes_loaded"]


def test_a_killed_run_goes_on_where_it_stopped(
    config: EvalConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = told(run(config))
    folder = tmp_path / "out"
    config = replace(config, output=str(folder))
    asked: list[int] = []
    together = retention.together

    def dies(engine: Engine, requests: Any) -> Any:
        asked.append(len(requests))
        if len(asked) == COUNT + 3:  # in the second arm
            raise KeyboardInterrupt
        return together(engine, requests)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "together", dies)
        with pytest.raises(KeyboardInterrupt):
            run(config)
        torn = folder / "affinity-0.5.answers.jsonl"
        assert torn.read_bytes().count(b"\n") == 2
        torn.write_bytes(torn.read_bytes() + b'{"place": 2, "dig')  # the machine died while writing
        asked.clear()
        patch.setattr(retention, "together", lambda engine, requests: asked.append(1) or together(engine, requests))
        report = run(config)
    assert len(asked) == 2 * COUNT - 2
    assert told(report) == wanted
    assert json.loads((folder / "report.json").read_text())["arms"][0]["name"] == "vanilla"


def test_a_folder_of_another_run_is_refused(config: EvalConfig, tmp_path: Path) -> None:
    config = replace(config, output=str(tmp_path), limit=2, keep_ratio=())
    run(config)
    with pytest.raises(UsageError, match="max_new_tokens 5, this one has 4"):
        run(replace(config, max_new_tokens=4))
    with pytest.raises(UsageError, match="rows 2, this one has 3"):
        run(replace(config, limit=3))


def test_questions_that_do_not_fit_together_are_asked_in_smaller_batches(config: EvalConfig) -> None:
    plan = plan_for(PlanConfig(model=config.model))
    tight = replace(config, device_memory=plan.minimum_bytes, keep_ratio=(), max_new_tokens=300)
    assert told(run(replace(tight, batch_size=6))) == told(run(tight))
