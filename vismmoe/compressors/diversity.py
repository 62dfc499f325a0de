"""Diversity by maximal marginal relevance: salient tokens that do not repeat one another (as IDPruner does)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vismmoe.compressors.base import Method, check_count
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class DiversityCompressor(Method):
    """One token at a time by relevance * s - (1 - relevance) * cosine with the most alike of those taken."""

    relevance: float = 0.6
    name: str = "diversity"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices."""
        total = len(visual.saliency)
        check_count(count, total)
        # centred: visual embeddings share a large mean, which would make all of them alike
        points = F.normalize(visual.embeddings.float() - visual.embeddings.float().mean(0, keepdim=True), dim=-1)
        alike = torch.zeros(total, device=points.device)
        score = self.relevance * visual.saliency.float()
        taken: list[int] = []
        while len(taken) < count:
            marginal = score - (1 - self.relevance) * alike
            marginal[taken] = -torch.inf
            taken.append(int(marginal.argmax()))
            similar = points @ points[taken[-1]]
            alike = similar if len(taken) == 1 else torch.maximum(alike, similar)
        return torch.tensor(taken, dtype=torch.int64, device=points.device).sort().values
