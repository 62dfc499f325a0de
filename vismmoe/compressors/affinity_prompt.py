"""Affinity by bytes that reads the question (ours): what it asks about is worth as much as what stands out anyway."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vismmoe.compressors.affinity_bytes import AffinityBytesCompressor
from vismmoe.compressors.prompt import relevance
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class AffinityPromptCompressor(AffinityBytesCompressor):
    """As AffinityBytesCompressor, with (s + attention * r) / (1 + attention) in the place of the saliency s; r is how
    alike a token's state is to the question's."""

    attention: float = 1.0
    name: str = "affinity-prompt"

    def _worth(self, visual: VisualTokens) -> Tensor:
        return (super()._worth(visual) + self.attention * relevance(visual)) / (1 + self.attention)
