"""Residency-aware affinity (ours): experts that have a slab already are free, whoever asked for them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vismmoe.compressors.affinity_bytes import AffinityBytesCompressor
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class AffinityResidentCompressor(AffinityBytesCompressor):
    """As AffinityBytesCompressor, with what the cache holds as paid for: the choice depends on earlier requests."""

    name: str = "affinity-resident"

    def _use(self, visual: VisualTokens) -> tuple[Tensor, Tensor]:
        use, free = super()._use(visual)
        if visual.ahead is not None:
            free = free | visual.ahead.resident.flatten().to(free.device)
        return use, free
