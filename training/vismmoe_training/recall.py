"""What a list of k experts is worth, as torchmetrics metrics: sums over batches, so that batches add up exactly.

Scores are (B, W, E), or (B, 1, E) for one list for all distances; active is (B, W, E) bool, the experts that the layer
d layers ahead then used (false where there is no such layer).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from vismmoe.metrics import hot_hits, top_experts


class _Shares(Metric):
    """A ratio of two sums for each distance."""

    full_state_update = False
    part: Tensor
    whole: Tensor

    def __init__(self, k: int, window: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k
        self.add_state("part", default=torch.zeros(window, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("whole", default=torch.zeros(window, dtype=torch.float64), dist_reduce_fx="sum")

    def compute(self) -> Tensor:
        """(W,) value by distance; nan where nothing was counted."""
        return self.part / self.whole

    def blended(self) -> float:
        """All distances together: not comparable between different windows."""
        total = float(self.whole.sum())
        return float(self.part.sum()) / total if total else float("nan")

    def _add(self, part: Tensor, whole: Tensor) -> None:
        self.part += part.double().sum(0)
        self.whole += whole.double().sum(0)


class HotRecall(_Shares):
    """Activated experts among the predictor's top k / activated experts (VisMMoE §2)."""

    higher_is_better = True

    def update(self, scores: Tensor, active: Tensor, weight: Tensor | None = None) -> None:
        """weight: (B, W, E) counts each activated expert by that much, its gate mass, instead of 1."""
        self._add(*hot_hits(scores.expand(active.shape), active, self.k, weight))


class HotPrecision(_Shares):
    """Activated experts among the predictor's top k / k, where the layer exists."""

    higher_is_better = True

    def update(self, scores: Tensor, active: Tensor, exists: Tensor) -> None:
        """exists: (B, W) bool, there is a layer d layers ahead."""
        hits, _ = hot_hits(scores.expand(active.shape), active, self.k)
        self._add(hits * exists, exists * min(self.k, active.shape[-1]))


class BytesMoved(_Shares):
    """Bytes a call that loading the top k would move, if the slabs held what the layer used last."""

    higher_is_better = False

    def __init__(self, k: int, window: int, expert_bytes: int, **kwargs: Any) -> None:
        super().__init__(k, window, **kwargs)
        self.expert_bytes = expert_bytes

    def update(self, scores: Tensor, held: Tensor, exists: Tensor) -> None:
        """held: (B, W, E) bool, experts that need no loading; exists: (B, W) bool."""
        fresh = (top_experts(scores.expand(held.shape), self.k) & ~held).sum(-1)
        self._add(fresh * exists * self.expert_bytes, exists.float())


class UnionRecall(Metric):
    """The published blend read by its words: one list of k expert ids for the window, against all that it activates.

    Ids of different layers are put together, as the published head does; k of them can reach no more than
    k / (distinct ids of the window): see `ceiling`.
    """

    full_state_update = False
    higher_is_better = True
    sums: Tensor

    def __init__(self, k: int, gamma: float, **kwargs: Any) -> None:
        """gamma: a row of scores d layers ahead counts gamma^(d-1), as in the training target."""
        super().__init__(**kwargs)
        self.k, self.gamma = k, gamma
        self.add_state("sums", default=torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, scores: Tensor, active: Tensor) -> None:
        """scores: probabilities, so that distances compare."""
        decay = self.gamma ** torch.arange(scores.shape[1], dtype=torch.float32)
        union = active.any(1)
        hits, needed = hot_hits((scores * decay.view(-1, 1)).amax(1), union, self.k)
        reach = needed.clamp(max=self.k)
        self.sums += torch.stack((hits.sum(), needed.sum(), reach.sum())).double()

    def compute(self) -> Tensor:
        """Recall over all calls."""
        return self.sums[0] / self.sums[1]

    def ceiling(self) -> float:
        """What the best list of k could reach."""
        return float(self.sums[2] / self.sums[1])
