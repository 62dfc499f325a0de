"""Recall by hand, and counters that add up."""

from __future__ import annotations

import math

import pytest
import torch

from vismmoe.metrics import PhaseCounters, coverage, hot_hits, hot_recall, recall_ceiling, top_experts

SCORES = torch.tensor([[0.9, 0.1, 0.8, 0.3, 0.0]])  # ranking: 0, 2, 3, 1, 4


def active(*experts: int) -> torch.Tensor:
    return torch.isin(torch.arange(5), torch.tensor(experts)).unsqueeze(0)


@pytest.mark.parametrize(("k", "expected"), [(1, 0.0), (2, 1 / 3), (3, 1 / 3), (4, 2 / 3), (5, 1.0), (9, 1.0)])
def test_recall_counts_activated_experts_among_the_top_k(k: int, expected: float) -> None:
    assert hot_recall(SCORES, active(1, 2, 4), k) == pytest.approx(expected)


def test_recall_is_a_ratio_of_sums_so_a_row_with_more_experts_weighs_more() -> None:
    scores = SCORES.expand(2, 5)
    both = torch.cat((active(0), active(1, 3, 4)))
    assert hot_recall(scores, both, 1) == pytest.approx(1 / 4)


def test_recall_by_gate_mass_weighs_each_expert_by_its_mass() -> None:
    mass = torch.tensor([[0.7, 0.2, 0.0, 0.0, 0.1]])
    assert hot_recall(SCORES, active(0, 1, 4), 2, mass) == pytest.approx(0.7)


def test_mass_of_experts_that_were_not_activated_counts_for_nothing() -> None:
    hits, needed = hot_hits(SCORES, active(1), 2, torch.ones(1, 5))
    assert (hits.item(), needed.item()) == (0.0, 1.0)


def test_recall_without_any_activated_expert_is_no_number() -> None:
    assert math.isnan(hot_recall(SCORES, active(), 3))


def test_rows_without_activated_experts_do_not_change_the_recall() -> None:
    both = torch.cat((active(0, 1), active()))
    assert hot_recall(SCORES.expand(2, 5), both, 1) == pytest.approx(0.5)


def test_of_equal_scores_the_lower_expert_wins() -> None:
    assert top_experts(torch.zeros(1, 5), 2).tolist() == [[True, True, False, False, False]]


def test_the_ceiling_is_what_a_perfect_list_of_k_would_reach() -> None:
    both = torch.cat((active(0), active(0, 1, 2, 3)))
    assert recall_ceiling(both, 2) == pytest.approx(3 / 5)


def test_coverage_is_the_share_of_the_busiest_experts() -> None:
    assert coverage(torch.tensor([[5, 1, 3, 1, 0]]), 2) == pytest.approx(0.8)


def test_the_hit_rate_is_one_when_nothing_was_asked_for() -> None:
    assert PhaseCounters().hit_rate == 1.0
    assert PhaseCounters(accesses=4, hits=1, demand_loads=3).hit_rate == 0.25


def test_counters_add_up_over_requests_and_report_every_key_of_the_contract() -> None:
    total = PhaseCounters(accesses=4, hits=1, demand_loads=3, stall_ms=0.5) + PhaseCounters(accesses=2, hits=2)
    report = total.to_json()
    assert (report["accesses"], report["hits"], report["hit_rate"], report["stall_ms"]) == (6, 3, 0.5, 0.5)
    assert set(report) == {
        "accesses", "hits", "demand_loads", "cpu_runs", "prefetched", "prefetched_used", "bytes_loaded", "stall_ms",
        "hit_rate",
    }  # fmt: skip
