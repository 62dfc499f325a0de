"""What is counted while a request runs, and the pure functions that judge a predictor.

Hot Recall@k (VisMMoE §2): activated experts that are among the predictor's top k, divided by activated experts.
All recalls here are ratios of sums (every activated expert weighs the same), never means of per-row ratios.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class PhaseCounters:
    """Expert traffic of one phase (prefill or decode) of one request; one owner, the request's session.

    An access is one distinct (layer, expert) that one forward of the deeper, unpinned layers needs.
    """

    accesses: int = 0
    hits: int = 0
    demand_loads: int = 0
    cpu_runs: int = 0
    prefetched: int = 0  # experts whose speculative copy was issued in this phase
    prefetched_used: int = 0  # of those, how many were needed before they were evicted
    bytes_loaded: int = 0
    stall_ms: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Hits per access; 1.0 when nothing was asked for, since nothing was missed."""
        return self.hits / self.accesses if self.accesses else 1.0

    def to_json(self) -> dict[str, int | float]:
        """The object PHASE of the command line's report."""
        return {**asdict(self), "stall_ms": round(self.stall_ms, 3), "hit_rate": round(self.hit_rate, 6)}

    def __add__(self, other: PhaseCounters) -> PhaseCounters:
        return PhaseCounters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


def top_experts(scores: Tensor, k: int) -> Tensor:
    """The k best experts of each row as a mask.

    scores: (..., E) float, higher is better; of equal scores the lower expert index wins, on every device.
    Returns (..., E) bool with min(k, E) true entries a row.
    """
    import torch

    count = min(k, scores.shape[-1])
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def hot_hits(scores: Tensor, active: Tensor, k: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of Hot Recall@k for each row (VisMMoE §2).

    scores: (..., E); active: (..., E) bool, the experts that really ran; weight: (..., E) counts each activated
    expert by that much (its gate mass) instead of 1. Returns two (...) float32 tensors; a row without an
    activated expert gives (0, 0), so it does not count.
    """
    import torch

    value = active.to(torch.float32) if weight is None else weight.to(torch.float32) * active
    return (value * top_experts(scores, k)).sum(-1), value.sum(-1)


def hot_recall(scores: Tensor, active: Tensor, k: int, weight: Tensor | None = None) -> float:
    """Hot Recall@k over all rows together; nan when no expert was activated."""
    hits, needed = hot_hits(scores, active, k, weight)
    total = float(needed.sum())
    return float(hits.sum()) / total if total else float("nan")


def recall_ceiling(active: Tensor, k: int) -> float:
    """The best Hot Recall@k that any list of k experts could reach: a wide prefill needs more than k experts.

    active: (..., E) bool.
    """
    needed = active.sum(-1).double()
    total = float(needed.sum())
    return float(needed.clamp(max=k).sum()) / total if total else float("nan")


def coverage(counts: Tensor, k: int) -> float:
    """Share of the routed tokens that the k busiest experts of each row take: "top-k expert coverage".

    counts: (..., E) tokens, or gate mass, per expert.
    """
    total = float(counts.double().sum())
    return float(counts.double().topk(min(k, counts.shape[-1]), dim=-1).values.sum()) / total if total else float("nan")
