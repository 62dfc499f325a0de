"""The metric agrees with the pure functions, batch by batch."""

from __future__ import annotations

import math

import pytest
import torch

from vismmoe.metrics import hot_recall
from vismmoe_training.recall import HotRecall


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
