"""Affinity by bytes (ours): what a token would make the deeper layers load, were it kept.

The published Delta asks for the experts of the prefix, which are pinned and cost nothing any more, and compares with
the core only, so that on a large picture it is 0 everywhere. Here the routers of the next deeper layers say which
experts each token would ask for (next gate), and tokens are taken one by one: what an earlier one has paid for is free
for all later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vismmoe.compressors.base import Method, check_count, expert_use, salient_core
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class AffinityBytesCompressor(Method):
    """A salient core, then one token at a time by s - lambda * bytes still to load / bytes of all its experts."""

    layers_ahead: ClassVar[int] = 4
    salient_ratio: float = 0.2
    trade_off: float = 2.0
    name: str = "affinity-bytes"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices."""
        check_count(count, len(visual.saliency))
        use, free = self._use(visual)
        worth = self._worth(visual)
        core = salient_core(worth, self.salient_ratio, count)
        free = free | (use[:, core] > 0).any(1)
        return one_by_one(worth, use, free, core, count, self.trade_off).sort().values

    def _worth(self, visual: VisualTokens) -> Tensor:
        """(N,) float32 in [0, 1]: what a token is worth before anything is loaded for it."""
        return visual.saliency.float()

    def _use(self, visual: VisualTokens) -> tuple[Tensor, Tensor]:
        """(pairs, N) bytes that each token asks for, (pairs,) bool what is there already."""
        ahead = visual.prefix_experts if visual.ahead is None else visual.ahead.experts
        use = expert_use(ahead, visual.num_experts)
        if visual.ahead is not None:
            use = use * visual.ahead.bytes.repeat_interleave(visual.num_experts).to(use).unsqueeze(1)
        return use, torch.zeros(len(use), dtype=torch.bool, device=use.device)


def one_by_one(saliency: Tensor, use: Tensor, free: Tensor, chosen: Tensor, count: int, price: float) -> Tensor:
    """Greedy choice: each taken token makes its experts free for the others.

    saliency: (N,); use: (pairs, N) cost of each pair for each token; free: (pairs,) bool; chosen: (C,) int64 taken
    already. Returns (count,) int64 in the order of taking.
    """
    whole = use.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
    left = use[~free].sum(0)
    free, open_ = free.clone(), torch.zeros_like(saliency)
    open_[chosen] = -torch.inf
    taken = chosen.tolist()
    while len(taken) < count:
        token = int((saliency - price * left / whole + open_).argmax())
        fresh = (use[:, token] > 0) & ~free
        left = left - use[fresh].sum(0)
        free |= fresh
        open_[token] = -torch.inf
        taken.append(token)
    return torch.tensor(taken, dtype=torch.int64, device=saliency.device)
