"""The metrics agree with the pure functions, batch by batch, and with cases worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from vismmoe.metrics import hot_recall
from vismmoe_training.recall import BytesMoved, HotPrecision, HotRecall, UnionRecall


def by_hand() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One call, two distances, four experts: scores, what then ran, gate mass."""
    scores = torch.tensor([[[0.9, 0.8, 0.1, 0.0], [0.1, 0.9, 0.2, 0.8]]])
    active = torch.tensor([[[True, False, True, False], [False, True, False, True]]])
    mass = torch.tensor([[[0.75, 0.0, 0.25, 0.0], [0.0, 0.5, 0.0, 0.5]]])
    return scores, active, mass


def test_recall_by_hand() -> None:
    scores, active, mass = by_hand()
    plain, weighted = HotRecall(k=2, window=2), HotRecall(k=2, window=2)
    plain.update(scores, active)
    weighted.update(scores, active, mass)
    assert plain.compute().tolist() == [0.5, 1.0]
    assert plain.blended() == 0.75
    assert weighted.compute().tolist() == [0.75, 1.0]  # what is found carries three quarters of the mass
    assert weighted.blended() == pytest.approx(1.75 / 2)


def test_precision_by_hand_leaves_out_layers_that_do_not_exist() -> None:
    scores, active, _ = by_hand()
    precision = HotPrecision(k=2, window=2)
    precision.update(scores, active, torch.tensor([[True, True]]))
    precision.update(scores, torch.zeros_like(active), torch.tensor([[True, False]]))
    assert precision.compute().tolist() == [0.25, 1.0]  # 1 of 2, then 0 of 2; 2 of 2, then no such layer


def test_bytes_by_hand_are_those_of_experts_that_are_not_held() -> None:
    scores, _, _ = by_hand()
    held = torch.tensor([[[True, False, False, False], [False, True, False, True]]])
    moved = BytesMoved(k=2, window=2, expert_bytes=100)
    moved.update(scores, held, torch.tensor([[True, True]]))
    assert moved.compute().tolist() == [100.0, 0.0]
    assert moved.blended() == 50.0


def test_the_published_blend_by_hand() -> None:
    scores, active, _ = by_hand()
    union = UnionRecall(k=2, gamma=0.5)
    union.update(scores, active)
    # best of both rows, the second halved: 0.9, 0.8, 0.1, 0.4: experts 0 and 1 of the four that run
    assert union.compute().item() == 0.5
    assert union.ceiling() == 0.5


def test_batches_add_up_to_the_recall_of_all_rows() -> None:
    torch.manual_seed(0)
    scores, active = torch.rand(20, 3, 16), torch.rand(20, 3, 16) < 0.2
    metric = HotRecall(k=4, window=3)
    for part in range(0, 20, 7):
        metric.update(scores[part : part + 7], active[part : part + 7])
    by_distance = [hot_recall(scores[:, d], active[:, d], 4) for d in range(3)]
    assert metric.compute().tolist() == pytest.approx(by_distance)
    assert metric.blended() == pytest.approx(hot_recall(scores, active, 4))


def test_one_list_is_judged_at_every_distance() -> None:
    active = torch.zeros(1, 2, 4, dtype=torch.bool)
    active[0, 0, 1] = active[0, 1, 2] = True
    metric = HotRecall(k=1, window=2)
    metric.update(torch.tensor([[[0.0, 1.0, 0.5, 0.0]]]), active)
    assert metric.compute().tolist() == [1.0, 0.0]
    assert metric.blended() == 0.5


def test_a_distance_at_which_nothing_ran_is_no_number() -> None:
    metric = HotRecall(k=1, window=2)
    active = torch.zeros(1, 2, 4, dtype=torch.bool)
    active[0, 0, 1] = True
    metric.update(torch.zeros(1, 2, 4), active)
    assert math.isnan(metric.compute()[1].item())
    metric.reset()
    assert math.isnan(metric.blended())
