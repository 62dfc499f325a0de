"""Affinity by gate mass (ours): an expert counts by how much of the token it carries, not by its name on the list."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.compressors.affinity import share_beyond
from vismmoe.compressors.base import Method, best, check_count, expert_use, salient_core
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class AffinityMassCompressor(Method):
    """As AffinityCompressor; Delta_i is the gate mass of token i outside the core's experts, over all of its mass."""

    salient_ratio: float = 0.2
    trade_off: float = 2.0
    name: str = "affinity-mass"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices."""
        check_count(count, len(visual.saliency))
        core = salient_core(visual.saliency, self.salient_ratio, count)
        mass = expert_use(visual.prefix_experts, visual.num_experts, visual.prefix_weights)
        score = visual.saliency.float() - self.trade_off * share_beyond(mass, core)
        score[core] = torch.inf
        return best(score, count).sort().values
