"""Every worked example gives the value that the named harness's own functions printed for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vismmoe.evaluate.benchmarks import BENCHMARKS, checked_all
from vismmoe.evaluate.score import Reading, Score

CASES = Path(__file__).parent / "cases"
NAMES = {
    "lmms_eval": "lmms-eval",
    "lmms_eval_static": "lmms-eval",
    "vlmevalkit": "vlmevalkit",
    "vlmevalkit_exact_matching": "vlmevalkit",
    "official": "official",
}
HARNESS_ONLY = {"without_padding", "error", "split", "first_prompt"}


def examples() -> Iterator[Any]:
    for file in sorted(CASES.glob("*.json")):
        for case in json.loads(file.read_text("utf-8"))["cases"]:
            for harness, expected in case["expected"].items():
                rows = case["inputs"]["rows"]
                yield pytest.param(file.stem, NAMES[harness], rows, expected, id=f"{file.stem}-{case['id']}-{harness}")


@pytest.mark.parametrize(("benchmark", "scorer", "rows", "expected"), examples())
def test_each_worked_example_gives_the_stated_values(benchmark: str, scorer: str, rows: Any, expected: Any) -> None:
    score, readings = scored(benchmark, scorer, rows)
    if "error" in expected:
        assert score.value is None
        assert score.undefined
    else:
        assert score.value is not None
        assert not score.undefined
    told = {**score.values, **told_of_rows(readings)}
    if benchmark == "mme" and scorer == "official":
        told["row_labels_by_category"] = by_category(readings)
    for name, value in expected.items():
        if name not in HARNESS_ONLY:
            assert_alike(told[name], value, name)


def test_each_worked_example_gives_the_stated_prompt() -> None:
    stated = [example.values for example in examples() if "first_prompt" in example.values[3]]
    assert len(stated) > 30
    for benchmark, scorer, rows, expected in stated:
        row = checked_all(BENCHMARKS[benchmark], [("row 1", rows[0])])[0]
        assert BENCHMARKS[benchmark].prompts[scorer].text(row) == expected["first_prompt"]


def test_prompts_are_those_of_the_harnesses() -> None:
    options = {"A": "cat", "B": "dog", "C": "horse", "D": None}
    rows = {
        "mme": {"question": "Is there a train in this image? Please answer yes or no."},
        "pope": {"question": "Is there a dog in the image?"},
        "ocrbench": {"question": "what is written in the image?"},
        "mmbench": {"question": "Which animal is shown?", "hint": "Look at the ears.", **options},
    }
    seen = 0
    for name, row in rows.items():
        told = json.loads((CASES / f"{name}.json").read_text("utf-8"))["prompts"]
        sets = BENCHMARKS[name].prompts
        if "lmms_eval_default" in told:
            assert sets["lmms-eval"].text(row) == told["lmms_eval_default"]
            seen += 1
        kit = told["vlmevalkit"].get("MMBench_DEV_EN", told["vlmevalkit"])
        assert sets["vlmevalkit"].text(row) == kit["vlmevalkit_dataset_default"][-1]["value"]
        assert sets["vlmevalkit-qwen3"].text(row) == kit["qwen3vl_custom"]
        if not kit["qwen2vl_custom"].startswith("("):
            assert sets["vlmevalkit-qwen2"].text(row) == kit["qwen2vl_custom"]
    assert seen == 3


def scored(benchmark: str, scorer: str, rows: list[dict[str, Any]]) -> tuple[Score, list[Reading]]:
    numbered = [(f"row {place}", row) for place, row in enumerate(rows, start=1)]
    return BENCHMARKS[benchmark].scorers[scorer](checked_all(BENCHMARKS[benchmark], numbered))


def told_of_rows(readings: list[Reading]) -> dict[str, list[Any]]:
    first = list({reading.place: reading for reading in reversed(readings)}.values())[::-1]
    extras = {name: [reading.extra.get(name) for reading in first] for name in first[0].extra}
    return {
        "row_labels": [reading.label for reading in first],
        "row_scores": [reading.score for reading in first],
        **extras,
    }


def by_category(readings: list[Reading]) -> dict[str, list[str | None]]:
    found: dict[str, list[str | None]] = {}
    for reading in readings:
        found.setdefault(reading.row["category"], []).append(reading.label)
    return found


def assert_alike(ours: Any, wanted: Any, name: str) -> None:
    """What the harness tells must be there; ours may tell more."""
    if isinstance(wanted, dict):
        for key, value in wanted.items():
            if key == "row_labels":  # of a split: they are looked at on the whole
                continue
            assert key in ours, f"{name}.{key}"
            assert_alike(ours[key], value, f"{name}.{key}")
    elif isinstance(wanted, float):
        assert ours == pytest.approx(wanted, abs=1e-9), name
    else:
        assert ours == wanted, name
