"""Matrix products of decode: one row times a weight, by the routine of torch that reads the weight's bytes just once.

A product of one row costs what it costs to read the weight. In 16-bit formats on a CPU, the general routine behind
`linear` takes longer: it first packs the weight for a product of many rows. Milliseconds for one row and one expert of
Qwen3-VL-30B-A3B (bfloat16, H = 2048, I = 768, weights from memory; 2 cores with AMX, torch 2.14; "sum": adding the same
bytes up, which is about what the memory allows; `python benchmarks/one_row.py --threads N`):

| weight, as it lies          | threads | linear | here | sum  |
|-----------------------------|---------|--------|------|------|
| gate_up, transposed (H, 2I) | 1       | 1.25   | 0.63 | 0.53 |
|                             | 2       | 1.00   | 0.53 | 0.40 |
| down, transposed (I, H)     | 1       | 0.83   | 0.39 | 0.36 |
|                             | 2       | 0.54   | 0.26 | 0.20 |
| gate_up, straight (2I, H)   | 1       | 0.61   | 0.54 | 0.54 |
|                             | 2       | 0.58   | 0.40 | 0.40 |
| down, straight (H, I)       | 1       | 0.66   | 0.52 | 0.35 |
|                             | 2       | 0.40   | 0.33 | 0.19 |

Also tried, and no faster: `bmm`, `mm` and rows padded to 2 to 16, for either layout; `mv` of a transposed weight, which
is slower than `linear`; huge pages. In float32 `linear` reads at the memory's speed from one row on, so that it keeps
transformers' own bits there.

From two rows on `linear` is as good as anything, but in 16-bit formats it compiles a kernel for each number of rows it
meets, and keeps it: for experts of these shapes and all numbers of rows up to 129, 353 MB and 4.6 s. Rows of zeros
make a few numbers of all: 26 MB and 0.6 s.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

import torch
from torch import Tensor, nn
from torch.nn import functional

_HALVES = (torch.bfloat16, torch.float16)
_TILE = 16
_SUM = 0  # embedding_bag's mode
_BLOCKS = 8  # column blocks of a transposed weight: enough for 8 threads, narrow enough for a core's registers


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rows (R, K) @ weight (N, K)^T + bias (N,): (R, N). Any float type and strides; sums in float32 or better.

    A row's bits depend on R, on nothing else: neither on where the weight lies nor on other products.
    """
    count = rows.shape[0]
    if rows.dtype not in _HALVES or not rows.is_cpu:
        return functional.linear(rows, weight, bias)
    if count == 1 and bias is None:
        if weight.is_contiguous():
            if rows.dtype is torch.bfloat16:  # mv of float16 is slower than linear
                return torch.mv(weight, rows[0]).unsqueeze(0)
        elif weight.stride() == (1, weight.shape[0]):
            return _times_transposed(rows, weight.t())
    added = round_up_rows(count) - count
    if not added:
        return functional.linear(rows, weight, bias)
    return functional.linear(functional.pad(rows, (0, 0, 0, added)), weight, bias)[:count]


def round_up_rows(count: int) -> int:
    """Few numbers of rows for all: matrix units take 16 rows at a time, so that little is computed in vain."""
    if count <= _TILE:
        return 1 << (count - 1).bit_length() if count else 0
    step = max(_TILE, (1 << (count - 1).bit_length()) // 8)  # an eighth to a quarter of the whole, at the most
    return -(-count // step) * step


def _times_transposed(row: Tensor, held: Tensor) -> Tensor:
    """row (1, K) @ held (K, N): (1, N): the sum of held's rows, each times its weight, as embedding bags are made.

    Each block of columns is a bag of its own, for the threads to share; sums go over k in order, whatever the block.
    """
    length, width = held.shape
    blocks = gcd(width, _BLOCKS)
    places, starts = _bags(length, blocks)
    table = held.view(length * blocks, width // blocks)  # row k * blocks + b: block b of held's row k
    each = torch.cat((row,) * blocks, -1)[0]  # a quarter of the time that repeat() takes
    return torch.embedding_bag(table, places, starts, False, _SUM, False, each)[0].view(1, width)


@lru_cache(maxsize=32)
def _bags(length: int, blocks: int) -> tuple[Tensor, Tensor]:
    """(blocks * length,) rows of the table, bag by bag, and (blocks,) where each bag begins; both int32."""
    with torch.inference_mode(False):
        first = torch.arange(blocks, dtype=torch.int32)
        places = first.unsqueeze(1) + torch.arange(length, dtype=torch.int32) * blocks
        return places.view(-1), first * length


class OneRowLinear(nn.Linear):
    """nn.Linear whose product of one row is the one above."""

    def forward(self, input: Tensor) -> Tensor:
        """input: (..., in_features)."""
        if input.numel() != self.in_features or self.bias is not None:
            return super().forward(input)
        out = product(input.reshape(1, -1), self.weight)
        return out.view(*input.shape[:-1], self.out_features)


def quicken_linears(model: nn.Module) -> None:
    """Let every plain nn.Linear of the model (its own class, no subclass) take one row by `product`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneRowLinear
