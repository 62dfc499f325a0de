"""The table of rules: measured on the same rows, with a ceiling, and honest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.trace import read_traces
from vismmoe_training.data import LookaheadData
from vismmoe_training.evaluate_predictors import (
    CEILING,
    Recall,
    compare,
    control,
    recall_table,
    scoring_rules,
    to_json,
    verdict,
)
from vismmoe_training.recall import BytesMoved, HotPrecision, HotRecall
from vismmoe_training.row_table import RowTable

WriteLogs = Callable[..., Path]


@pytest.fixture
def recalls(write_logs: WriteLogs) -> list[Recall]:
    torch.manual_seed(0)
    table = RowTable(read_traces([write_logs(items=12)]), 3)
    net = LookaheadNet(PredictorConfig(window=3, hidden_sizes=(4, 4)), table.spec, folded=True).eval()
    return compare(net, LookaheadData(table, 16, 0.3, 0.3, 0))


def value(recalls: list[Recall], rule: str, phase: str = "decode", k: int = 20, distance: int = 1) -> float:
    found = [r for r in recalls if (r.rule, r.phase, r.k, r.distance) == (rule, phase, k, distance)]
    assert len(found) == 1
    return found[0].recall


def test_every_rule_is_measured_in_every_phase_at_every_k_and_distance(recalls: list[Recall]) -> None:
    assert len(recalls) == 6 * 3 * 3 * 4  # rules, phases, k, distances and blended


def test_chance_reads_k_of_the_experts_and_next_gate_beats_it(recalls: list[Recall]) -> None:
    assert value(recalls, "chance", distance=0) == pytest.approx(20 / 32, abs=0.06)
    assert value(recalls, "next gate") > value(recalls, "chance") + 0.1


def test_no_rule_passes_the_ceiling(recalls: list[Recall]) -> None:
    for r in recalls:
        assert r.recall <= value(recalls, CEILING, r.phase, r.k, r.distance) + 1e-9
        assert 0 <= r.mass_recall <= 1 + 1e-9


def test_eight_of_many_experts_are_within_reach_but_a_wide_prefill_is_not(recalls: list[Recall]) -> None:
    assert value(recalls, CEILING, "decode", 10) == 1.0
    assert value(recalls, CEILING, "prefill", 10) < 1.0


def test_blended_lies_between_the_distances(recalls: list[Recall]) -> None:
    by_distance = [value(recalls, "next gate", distance=d) for d in (1, 2, 3)]
    assert min(by_distance) <= value(recalls, "next gate", distance=0) <= max(by_distance)


def test_the_table_names_every_rule_and_the_json_holds_every_figure(recalls: list[Recall]) -> None:
    table = recall_table(recalls, "decode")
    assert all(rule in table for rule in ("lookahead", "next gate", "previous token", "frequency", "chance", CEILING))
    told = to_json(recalls)
    assert told["decode"]["next gate"]["recall@20"]["1"] == pytest.approx(value(recalls, "next gate"), abs=1e-6)
    assert set(told["all"]["chance"]["mass_recall@30"]) == {"1", "2", "3", "blended"}


def test_the_verdict_names_where_a_trivial_rule_is_as_good() -> None:
    def at(rule: str, distance: int, recall: float) -> Recall:
        return Recall(rule, "all", 20, distance, recall, recall)

    fine = [at("lookahead", 1, 0.8), at("next gate", 1, 0.9), at("chance", 1, 0.1), at(CEILING, 1, 1.0)]
    assert verdict(fine) == []
    poor = [*fine, at("lookahead", 2, 0.6), at("next gate", 2, 0.7), at("frequency", 2, 0.6)]
    assert verdict(poor) == [
        "at distance 2 (all) frequency has recall@20 60.0%, the predictor 60.0%",
        "at distance 2 (all) next gate has recall@20 70.0%, the predictor 60.0%",
    ]


def test_the_sums_are_those_of_the_metrics(write_logs: WriteLogs) -> None:
    torch.manual_seed(0)
    table = RowTable(read_traces([write_logs(items=12, name="a"), write_logs(items=12, name="b")]), 3)
    net = LookaheadNet(PredictorConfig(window=3, hidden_sizes=(4, 4)), table.spec, folded=True).eval()
    data = LookaheadData(table, 16, 0.3, 0.3, 0)
    recalls = compare(net, data, detailed=True)
    score = scoring_rules(net, data)["next gate"]
    for phase, layer in (("decode", None), ("decode, layer 1", 1), ("prefill", None)):
        plain, weighed = HotRecall(10, 3), HotRecall(10, 3)
        precision, moved = HotPrecision(10, 3), BytesMoved(10, 3, expert_bytes=1)
        for rows, batch in data.batches("test"):
            mine = batch.inputs.decode if phase.startswith("decode") else ~batch.inputs.decode
            mine = mine if layer is None else mine & (batch.inputs.row == layer)
            scores, active = score(rows, batch)[mine], batch.active[mine]
            plain.update(scores, active)
            weighed.update(scores, active, table.mass(rows)[mine])
            precision.update(scores, active, batch.exists[mine])
            moved.update(scores, table.held(rows)[mine], batch.exists[mine])
        for r in recalls:
            if (r.rule, r.phase, r.k) == ("next gate", phase, 10):
                at = r.distance - 1
                metrics = (plain, weighed, precision, moved)
                wanted = [m.blended() if at < 0 else m.compute()[at].item() for m in metrics]
                assert [r.recall, r.mass_recall, r.precision, r.moved] == pytest.approx(wanted)
    assert {r.phase for r in recalls} >= {"decode, layer 0", "decode, corpus a", "decode, corpus b"}


def test_control_each_router_on_its_own_input_reads_one_hundred_percent(write_logs: WriteLogs) -> None:
    data = LookaheadData(RowTable(read_traces([write_logs(items=6)]), 3), 16, 0.3, 0.3, 0)
    assert control(data) == 1.0
