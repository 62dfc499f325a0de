"""Hot Recall@k as a torchmetrics metric: one value per distance, summed over batches exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from vismmoe.metrics import hot_hits


class HotRecall(Metric):
    """Activated experts among the predictor's top k / activated experts, for each distance 1..W (VisMMoE §2)."""

    full_state_update = False
    higher_is_better = True
    hits: Tensor
    needed: Tensor

    def __init__(self, k: int, window: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k
        self.add_state("hits", default=torch.zeros(window, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("needed", default=torch.zeros(window, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, active: Tensor) -> None:
        """scores: (B, W, E), or (B, 1, E) for one list for all distances; active: (B, W, E) bool."""
        hits, needed = hot_hits(scores.expand(active.shape), active, self.k)
        self.hits += hits.double().sum(0)
        self.needed += needed.double().sum(0)

    def compute(self) -> Tensor:
        """(W,) recall by distance; nan where nothing was activated."""
        return self.hits / self.needed

    def blended(self) -> float:
        """All distances together: not comparable between different windows."""
        total = float(self.needed.sum())
        return float(self.hits.sum()) / total if total else float("nan")
