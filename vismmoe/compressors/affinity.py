"""Affinity-aware token compression, as published (VisMMoE §1 of our notes, §4.1 of the paper)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.compressors.base import best, check_count
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class AffinityCompressor:
    """A salient core first, then the tokens that are salient and ask for few experts beyond the core's.

    salient_ratio: alpha, share of the visual tokens in the core. trade_off: lambda, price of marginal expansion.
    """

    salient_ratio: float = 0.2
    trade_off: float = 2.0
    name: str = "affinity"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices: I_core, then TopK(s - lambda * Delta) of the rest."""
        total = len(visual.saliency)
        check_count(count, total)
        core = best(visual.saliency, min(int(self.salient_ratio * total), count))
        score = visual.saliency.float() - self.trade_off * marginal_expansion(visual, core)
        score[core] = torch.inf  # the core is kept whatever it costs
        return best(score, count).sort().values


def marginal_expansion(visual: VisualTokens, core: Tensor) -> Tensor:
    """Delta_i = |E_i minus E_core| / |E_i| with experts as (prefix layer, expert) pairs.

    core: (C,) int64 indices of the core's tokens. Returns (N,) float32 in [0, 1]; zeros without a prefix.
    """
    layers, total, _ = visual.prefix_experts.shape
    chosen = torch.zeros(layers, total, visual.num_experts, dtype=torch.bool, device=visual.prefix_experts.device)
    chosen.scatter_(-1, visual.prefix_experts, True)
    beyond = chosen & ~chosen[:, core].any(1, keepdim=True)
    return beyond.sum((0, 2)).float() / chosen.sum((0, 2)).clamp(min=1)
