"""Slabs: pieces of memory of one expert each, allocated once and used again and again."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vismmoe.experts.places import BLOCK, Places
from vismmoe.types import ExpertId, ExpertLayout


class SlabPool:
    """`count` slabs of one expert each, in one block.

    Pinned experts live in a pool of their own: every expert then runs with the same strides and the same alignment,
    wherever it lies, which is what keeps streamed and resident answers byte-identical.
    """

    def __init__(
        self,
        count: int,
        layout: ExpertLayout,
        device: torch.device | str = "cpu",
        pin: bool = False,
        packed: bool | None = None,
    ) -> None:
        """pin: in page-locked memory, for copies to a GPU; RuntimeError where that is not to be had. packed: without
        room for reads in whole blocks; None: on a GPU, where nothing is read to."""
        self.count = count
        self.expert_bytes = layout.expert_bytes
        self.device = torch.device(device)
        self.layout = layout
        packed = self.device.type != "cpu" if packed is None else packed
        self.places = Places.packed(layout) if packed else Places.in_host_memory(layout)
        stride = self.places.stride
        block = torch.empty(count * stride + BLOCK, dtype=torch.uint8, device=self.device, pin_memory=pin and count > 0)
        start = -block.data_ptr() % BLOCK
        self._slabs = block[start : start + count * stride].view(count, stride)[:, : self.places.slab_bytes]
        self._weights: list[tuple[tuple[int, ...], Mapping[str, torch.Tensor]] | None] = [None] * count
        self._buffers: list[memoryview | None] = [None] * count

    def bytes(self, slot: int) -> torch.Tensor:
        """(slab_bytes,) uint8 view of one slab, with what lies between its parts."""
        return self._slabs[slot]

    def buffer(self, slot: int) -> memoryview:
        """Writable memory of one slab, slab_bytes long; only for pools on the CPU."""
        buffer = self._buffers[slot]
        if buffer is None:
            buffer = self._buffers[slot] = self._slabs[slot].numpy().data
        return buffer

    def parts(self, slot: int, expert: ExpertId | None = None) -> list[torch.Tensor]:
        """(part's bytes,) uint8 of each part of `expert` in the slab; None: of one that begins where its places do."""
        return [self._slabs[slot][span] for span in self.places.spans(expert)]

    def take(self, slot: int, other: SlabPool, row: int, expert: ExpertId) -> None:
        """Copy `expert` out of the other pool's slab; does not wait for the copy where a GPU takes part."""
        for mine, theirs in zip(self.parts(slot, expert), other.parts(row, expert), strict=True):
            mine.copy_(theirs, non_blocking=True)

    def weights(self, slot: int, expert: ExpertId | None = None) -> Mapping[str, torch.Tensor]:
        """Part name -> view of the slab in in-memory orientation, e.g. gate_up_proj (2I, H), checkpoint's dtype."""
        shifts = self.places.shifts.get(expert, ()) if expert is not None else ()
        known = self._weights[slot]
        if known is None or known[0] != shifts:
            known = self._weights[slot] = (shifts, self._views(slot, expert))
        return known[1]

    def _views(self, slot: int, expert: ExpertId | None) -> dict[str, torch.Tensor]:
        views = {}
        for part, held in zip(self.layout.parts, self.parts(slot, expert), strict=True):
            weight = held.view(self.layout.dtype).view(part.shape)
            views[part.name] = weight.transpose(-1, -2) if part.transposed else weight
        return views
