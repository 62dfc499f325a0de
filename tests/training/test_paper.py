"""The rule that names the default compressor, and the tables and JSON of made-up seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.types import ModelSpec
from vismmoe_training.arms import Asked
from vismmoe_training.evaluate_predictors import CEILING, Recall
from vismmoe_training.paper import published
from vismmoe_training.paper.ablation import STEPS, Step
from vismmoe_training.paper.answers import VANILLA, Answers, Outcome, Posed, covered
from vismmoe_training.paper.choice import winner
from vismmoe_training.paper.foresight import OURS, PUBLISHED, TOP, WINDOW, Foresight
from vismmoe_training.paper.paired import difference
from vismmoe_training.paper.scale import ARMS, REDUCED, SPECS, Paper
from vismmoe_training.paper.spread import Figure
from vismmoe_training.paper.tables import Results


def test_the_spread_is_the_sample_standard_deviation() -> None:
    figure = Figure.of([0.5, 0.7, 0.6])
    assert (figure.mean, figure.spread) == (pytest.approx(0.6), pytest.approx(0.1))
    assert figure.percent() == "60.0% ± 10.0"
    assert Figure.of([0.25]).spread == 0.0


def test_coverage_is_the_share_of_the_twenty_busiest_experts() -> None:
    chosen = torch.arange(40).view(20, 2)  # 20 tokens of top-2: each of 40 experts once
    assert covered(chosen, 128) == 0.5


def test_published_retention_is_the_mean_share_of_vanilla() -> None:
    assert published.RETENTION["affinity"][0.5] == pytest.approx(0.933, abs=5e-4)  # as the paper says itself
    assert published.RETENTION["random"][0.5] < published.RETENTION["affinity"][0.5]


def test_a_difference_is_of_right_answers_and_its_interval_of_whole_pictures() -> None:
    units = [("s", "a"), ("s", "a"), ("s", "b"), ("s", "b")]
    told = difference([True, True, True, False], [False, True, True, False], [True] * 4, units)
    assert told.value == 0.25
    # both draws from a: 1 of 2 in each picture; both from b: 0; one of each: 1 of 4
    assert (told.low, told.high) == (0.0, 0.5)
    same = difference([True, False], [True, False], [True, True], units[::2])
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)


def test_strata_are_drawn_apart() -> None:
    # one picture in each stratum: every draw is the whole
    told = difference([True, False], [False, False], [True, True], [("s", "a"), ("t", "a")])
    assert (told.value, told.low, told.high) == (0.5, 0.5, 0.5)


def figures(shares: dict[str, tuple[float, float, float]]) -> tuple[dict, dict]:  # type: ignore[type-arg]
    """name -> (kept at 70 %, kept at 50 %, unique experts at 50 %)."""
    kept = {(name, ratio): Figure.of([v[i]]) for name, v in shares.items() for i, ratio in enumerate((0.7, 0.5))}
    return kept, {(name, 0.5): Figure.of([v[2]]) for name, v in shares.items()}


def test_the_winner_needs_the_fewest_experts_of_those_that_answer_well_enough() -> None:
    shares = {
        "saliency": (1.0, 0.97, 100.0),
        "affinity": (0.99, 0.98, 96.0),
        "affinity-bytes": (0.99, 0.96, 80.0),  # below saliency by more than the spread
        "prompt": (0.97, 0.99, 70.0),  # too little at 70 %
        "random": (1.0, 1.0, 60.0),  # a baseline
    }
    assert winner(*figures(shares)) == "affinity"
    assert winner(*figures({"saliency": (0.9, 0.9, 100.0), "affinity": (0.9, 0.9, 90.0)})) is None


POSED = [
    Posed(kind, Asked(Path(f"{number}.png"), style, "?", "!"))
    for kind in SPECS
    for number, style in enumerate(("count", "reading"))
]


def outcome(right: bool, unique: float) -> Outcome:
    """Every reading is right; counts are if `right`."""
    asked = range(2 * len(SPECS))
    return Outcome(
        {number: right or number % 2 == 1 for number in asked}, dict.fromkeys(asked, unique), dict.fromkeys(asked, 10)
    )


@pytest.fixture
def results() -> Results:
    outcomes = {(method, ratio): outcome(method != "random", 90) for method, ratio in ARMS}
    answers = Answers(POSED, {(VANILLA, 1.0): outcome(True, 120), **outcomes}, dict.fromkeys(published.COVERAGE, 0.5))
    phases = ("decode", "prefill", "decode, layer 0")
    recalls = [
        Recall(rule, phase, k, d, 0.9, 0.8, 0.4, 5.0)
        for rule in (OURS, "next gate", CEILING, PUBLISHED)
        for phase in phases
        for k in TOP
        for d in range(WINDOW + 1)
    ]
    union = {name: {sign * k: 0.5 for k in TOP for sign in (1, -1)} for name in (OURS, PUBLISHED)}
    spec = ModelSpec("tiny", 2, (0, 1), 8, 2, 4, 4, "f")
    net = LookaheadNet(PredictorConfig(window=1, hidden_sizes=(2, 2)), spec, folded=True)
    foresight = Foresight(tuple(recalls), union, {"history": tuple(recalls)}, 1.0, net)
    made = Results(Paper("m", Path("c"), Path("o"), REDUCED, 1), [foresight, foresight], [answers, answers])
    made.ablations = [dict.fromkeys(STEPS, Step(100.0, 2.0, 3.0, 0.5))] * 2
    made.simulator_errors = {"on demand": Figure.of([0.04, 0.05])}
    return made


def test_the_json_has_the_promised_keys(results: Results) -> None:
    told = json.loads(json.dumps(results.to_json(), allow_nan=False))
    assert told["coverage"]["text"]["mean"] == 0.5
    assert told["hot_recall"]["next gate"]["20"]["3"]["mean"] == 0.9
    assert told["accuracy"]["random"]["0.5"]["mean"] == 0.5
    assert told["unique_experts"]["affinity"]["0.7"]["mean"] == 90
    assert told["accuracy_at_half_by_part"]["count"]["random"]["mean"] == 0.0
    assert told["accuracy_at_half_by_part"]["reading"]["random"]["mean"] == 1.0
    assert told["beyond_random"]["affinity"]["small scenes"]["0.5"] == {"value": 0.5, "low": 0.0, "high": 1.0}
    assert set(told["ablation"]) == set(STEPS)
    assert told["simulator_error"]["on demand"]["mean"] == pytest.approx(0.045)


def test_the_tables_name_the_published_figures_beside_ours(results: Results) -> None:
    text = str(results)
    for said in ("76.9%", "64.1%", "93.3%", "13.17", "50.0% ± 0.0", "4.5% ± 0.7"):
        assert said in text
