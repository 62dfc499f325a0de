"""What all compressors share: choosing the best `count` of N, and refusing a count that cannot be kept."""

from __future__ import annotations

import torch
from torch import Tensor


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, of equal ones the earlier token, so that a request repeats exactly.

    scores: (N,) float. Returns (count,) int64, highest first.
    """
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def check_count(count: int, total: int) -> None:
    """A caller's mistake, not a user's: counts come from `floor(keep_ratio * N)`. Raises ValueError."""
    if not 0 <= count <= total:
        raise ValueError(f"cannot keep {count} of {total} visual tokens")
