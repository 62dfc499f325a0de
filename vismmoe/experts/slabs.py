"""Slabs: pieces of memory of one expert each, allocated once and used again and again."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from vismmoe.types import ExpertLayout

PAGE = 4096  # direct I/O wants buffers that start on a page
_CACHE_LINE = 64


class SlabPool:
    """`count` slabs of one expert each, in one block.

    Pinned experts live in a pool of their own: every expert then runs with the same strides and the same alignment,
    wherever it lies, which is what keeps streamed and resident answers byte-identical.
    """

    def __init__(self, count: int, layout: ExpertLayout, device: torch.device | str = "cpu", pin: bool = False) -> None:
        """pin: in page-locked memory, for copies to a GPU; RuntimeError where that is not to be had."""
        self.count = count
        self.expert_bytes = layout.expert_bytes
        self.device = torch.device(device)
        self._layout = layout
        # A stride of whole cache lines gives each weight the same alignment in every slab: matrix kernels may pick
        # another path, with other rounding, when alignment differs.
        stride = -(-layout.expert_bytes // _CACHE_LINE) * _CACHE_LINE
        block = torch.empty(count * stride + PAGE, dtype=torch.uint8, device=self.device, pin_memory=pin and count > 0)
        start = -block.data_ptr() % PAGE
        self._slabs = block[start : start + count * stride].view(count, stride)[:, : layout.expert_bytes]
        self._weights: list[dict[str, torch.Tensor] | None] = [None] * count
        self._buffers: list[memoryview | None] = [None] * count

    def bytes(self, slot: int) -> torch.Tensor:
        """(expert_bytes,) uint8 view of one slab."""
        return self._slabs[slot]

    def buffer(self, slot: int) -> memoryview:
        """Writable memory of one slab, expert_bytes long; only for pools on the CPU."""
        buffer = self._buffers[slot]
        if buffer is None:
            buffer = self._buffers[slot] = self._slabs[slot].numpy().data
        return buffer

    def weights(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Part name -> view of the slab in in-memory orientation, e.g. gate_up_proj (2I, H), checkpoint's dtype."""
        weights = self._weights[slot]
        if weights is None:
            weights = self._weights[slot] = self._views(self._slabs[slot])
        return weights

    def _views(self, slab: torch.Tensor) -> dict[str, torch.Tensor]:
        views, start = {}, 0
        for part in self._layout.parts:
            end = start + math.prod(part.shape) * self._layout.dtype.itemsize
            weight = slab[start:end].view(self._layout.dtype).view(part.shape)
            views[part.name] = weight.transpose(-1, -2) if part.transposed else weight
            start = end
        return views
