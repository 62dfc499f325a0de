"""A matrix times one vector, as a decoded token needs it: in float32, or in one byte a weight where reading is dear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Product(Protocol):
    """A fixed matrix (n, m)."""

    def of(self, vector: Tensor) -> Tensor:
        """(m,) float -> (n,) float."""
        ...

    def plus(self, bias: Tensor, vector: Tensor) -> Tensor:
        """(n,) float32: bias + matrix @ vector."""
        ...


WHOLE_BLOCKS = 64  # torch's kernel reads whole blocks, whatever the sizes are: others must not be given to it


def short(weight: Tensor) -> Product:
    """In as few bytes as the matrix's sizes allow."""
    return Exact(weight) if any(size % WHOLE_BLOCKS for size in weight.shape) else Packed.pack(weight)


@dataclass(frozen=True)
class Exact:
    """In float32."""

    weight: Tensor  # (n, m)

    def of(self, vector: Tensor) -> Tensor:
        return torch.mv(self.weight, vector.float())

    def plus(self, bias: Tensor, vector: Tensor) -> Tensor:
        return torch.addmv(bias, self.weight, vector)


@dataclass(frozen=True)
class Packed:
    """In one byte a weight, each row by a scale of its own; what it multiplies and gives is bfloat16.

    torch's kernel for weight-only int8 (CPU, any vector extension): a quarter of float32's bytes, in half of its time.
    """

    values: Tensor  # (n, m) int8
    scales: Tensor  # (n,) bfloat16

    @classmethod
    def pack(cls, weight: Tensor) -> Packed:
        """weight: (n, m) float32. The scales are rounded first, so that rounding them costs nothing."""
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).bfloat16()
        values = (weight / scales.float().unsqueeze(1)).round().clamp(-127, 127)
        return cls(values.to(torch.int8).contiguous(), scales)

    def of(self, vector: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(vector.bfloat16().unsqueeze(0), self.values, self.scales)[0]

    def plus(self, bias: Tensor, vector: Tensor) -> Tensor:
        return torch.add(bias, self.of(vector))
