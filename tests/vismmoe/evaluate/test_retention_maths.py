"""The paired bootstrap and what else follows from readings alone."""

from __future__ import annotations

import pytest

from vismmoe.evaluate.benchmarks import BENCHMARKS
from vismmoe.evaluate.bootstrap import retention_interval


def pairs(wrong: set[int], count: int = 60) -> list[dict[str, object]]:
    return [
        {
            "question_id": f"{category}/{number // 2}",
            "category": category,
            "question": "?",
            "answer": "Yes" if number % 2 else "No",
            "prediction": ("No" if number % 2 else "Yes") if number in wrong else ("Yes" if number % 2 else "No"),
        }
        for category in ("existence", "count")
        for number in range(count)
    ]


def test_equal_runs_retain_everything_with_certainty() -> None:
    scorer = BENCHMARKS["mme"].scorers["lmms-eval"]
    readings = scorer.read(pairs({1, 5, 9}))
    found = retention_interval(scorer, readings, readings, draws=200)
    assert found is not None
    assert (found.low, found.high) == (1.0, 1.0)


@pytest.mark.parametrize("name", ["lmms-eval", "vlmevalkit", "official"])
def test_the_interval_holds_the_retention_and_narrows_with_more_questions(name: str) -> None:
    scorer = BENCHMARKS["mme"].scorers[name]
    widths = []
    for count in (40, 400):
        wrong = set(range(0, count, 5))
        before, after = scorer.read(pairs(set(), count)), scorer.read(pairs(wrong, count))
        found = retention_interval(scorer, before, after, draws=200)
        ratio = (scorer.total(after).value or 0) / (scorer.total(before).value or 1)
        assert found is not None
        assert found.low < ratio < found.high
        widths.append(found.high - found.low)
    assert widths[1] < widths[0] / 2


def test_runs_over_different_questions_are_not_compared() -> None:
    scorer = BENCHMARKS["mme"].scorers["lmms-eval"]
    with pytest.raises(ValueError, match="different questions"):
        retention_interval(scorer, scorer.read(pairs(set(), 20)), scorer.read(pairs(set(), 22)))


def test_nothing_is_retained_of_nothing() -> None:
    scorer = BENCHMARKS["mme"].scorers["lmms-eval"]
    readings = scorer.read(pairs(set(range(60))))
    assert retention_interval(scorer, readings, readings, draws=50) is None
