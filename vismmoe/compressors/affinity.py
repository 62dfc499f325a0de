"""Affinity-aware token compression, as published (VisMMoE §1 of our notes, §4.1 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.compressors.base import Method, best, check_count, expert_use, salient_core
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class AffinityCompressor(Method):
    """A salient core first, then the tokens that are salient and ask for few experts beyond the core's.

    salient_ratio: alpha, share of the visual tokens in the core. trade_off: lambda, price of marginal expansion.
    """

    salient_ratio: float = 0.2
    trade_off: float = 2.0
    name: str = "affinity"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices: I_core, then TopK(s - lambda * Delta) of the rest."""
        check_count(count, len(visual.saliency))
        core = salient_core(visual.saliency, self.salient_ratio, count)
        score = visual.saliency.float() - self.trade_off * marginal_expansion(visual, core)
        score[core] = torch.inf  # the core is kept whatever it costs
        return best(score, count).sort().values


def marginal_expansion(visual: VisualTokens, core: Tensor) -> Tensor:
    """Delta_i = |E_i minus E_core| / |E_i| with experts as (prefix layer, expert) pairs.

    core: (C,) int64 indices of the core's tokens. Returns (N,) float32 in [0, 1]; zeros without a prefix.
    """
    return share_beyond(expert_use(visual.prefix_experts, visual.num_experts), core)


def share_beyond(use: Tensor, core: Tensor) -> Tensor:
    """Share of each token's use that falls on experts which no token of the core uses.

    use: (pairs, N) float32 >= 0; core: (C,) int64. Returns (N,) float32 in [0, 1].
    """
    beyond = (use[:, core] == 0).all(1)
    return use[beyond].sum(0) / use.sum(0).clamp(min=torch.finfo(torch.float32).tiny)
