"""What all compressors share: choosing the best `count` of N, sets of experts, and refusing a count that cannot be."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor


class Method:
    """What a compressor needs unless it says otherwise."""

    layers_ahead: ClassVar[int] = 0  # deeper MoE layers whose experts it wants to know of each token
    needs_saliency: ClassVar[bool] = True  # False: it chooses without VisualTokens.saliency too

    def resize(self, width: int, height: int, keep_ratio: float, token_px: int) -> tuple[int, int]:
        """(width, height) in pixels that the picture is brought to before the vision tower sees it."""
        return width, height

    def count(self, total: int, keep_ratio: float) -> int:
        """How many of `total` visual tokens are kept: floor(beta N); 0.7 of 10 is 7, whatever floating point says."""
        return math.floor(keep_ratio * total + 1e-9)


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, of equal ones the earlier token, so that a request repeats exactly.

    scores: (N,) float. Returns (count,) int64, highest first.
    """
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def check_count(count: int, total: int) -> None:
    """A caller's mistake, not a user's: counts come from `floor(keep_ratio * N)`. Raises ValueError."""
    if not 0 <= count <= total:
        raise ValueError(f"cannot keep {count} of {total} visual tokens")


def salient_core(saliency: Tensor, salient_ratio: float, count: int) -> Tensor:
    """I_core (VisMMoE §4.1): the floor(alpha N) most salient tokens, at most `count`. Returns (C,) int64."""
    return best(saliency, min(int(salient_ratio * len(saliency)), count))


def expert_use(experts: Tensor, num_experts: int, weights: Tensor | None = None) -> Tensor:
    """(L * E, N) float32: 1, or the gate weight, where a token activates an expert of a layer; else 0.

    experts: (L, N, k) int64 chosen by each token in L layers; weights: the same shape.
    """
    layers, total, _ = experts.shape
    value = torch.ones_like(experts, dtype=torch.float32) if weights is None else weights.float()
    used = torch.zeros(layers, total, num_experts, device=experts.device).scatter_(-1, experts, value)
    return used.permute(0, 2, 1).reshape(layers * num_experts, total)
