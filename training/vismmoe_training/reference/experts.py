"""All experts of a layer in two batched products, forward and backward: what training on a CPU needs.

transformers' own implementations either loop with many small autograd nodes or call a grouped product that falls back
to something slow on a CPU. Here the rows of each expert are padded to whole blocks of `BLOCK` rows and every block
meets its expert's matrix in one batched product. The arithmetic is that of "eager", summed in another order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "vismmoe_training"
BLOCK = 64


class _Gather(torch.autograd.Function):
    """Rows by index, a row of zeros where the index lies past the end; the gradient is gathered too, never scattered.

    `forward_index` (M,) reads from rows (N, H); `backward_index` (N * fan_out,) names, for each source row, the
    `fan_out` places that it went to.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, forward_index: Tensor, backward_index: Tensor, fan_out: int) -> Tensor:
        ctx.save_for_backward(backward_index)
        ctx.fan_out = fan_out
        return _with_zero_row(rows).index_select(0, forward_index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        grad = _with_zero_row(grads[0]).index_select(0, index)
        if ctx.fan_out > 1:
            grad = grad.view(-1, ctx.fan_out, grad.shape[-1]).sum(1)
        return grad, None, None, None


class _BlockLinear(torch.autograd.Function):
    """rows (B, BLOCK, in) times each block's expert of weight (E, out, in) -> (B, BLOCK, out).

    `bounds` (E + 1) says at which slots the experts' rows begin and end: the gradient of one expert's weight is one
    product over all of its rows.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, expert: Tensor, bounds: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight, expert)
        ctx.bounds = bounds
        return torch.bmm(rows, weight.index_select(0, expert).transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, expert = ctx.saved_tensors
        grad, d_weight = grads[0].contiguous(), torch.zeros_like(weight)
        flat_grad, flat_rows = grad.view(-1, grad.shape[-1]), rows.reshape(-1, rows.shape[-1])
        for index, (start, end) in enumerate(itertools.pairwise(ctx.bounds)):
            if end > start:
                torch.mm(flat_grad[start:end].t(), flat_rows[start:end], out=d_weight[index])
        return torch.bmm(grad, weight.index_select(0, expert)), d_weight, None, None


def _with_zero_row(rows: Tensor) -> Tensor:
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


@dataclass(frozen=True)
class _Blocks:
    """Where the S = T * k (token, choice) pairs go: into B blocks of BLOCK slots, each block of one expert."""

    expert: Tensor  # (B,) expert of each block
    token_of_slot: Tensor  # (B * BLOCK,) token of each slot, T where the slot is padding
    pair_of_slot: Tensor  # (B * BLOCK,) pair of each slot, S where the slot is padding
    slot_of_pair: Tensor  # (S,)
    bounds: list[int]  # (E + 1) first slot of each expert, and the end


def _blocks(top_k_index: Tensor, experts: int) -> _Blocks:
    flat, top_k = top_k_index.reshape(-1), top_k_index.shape[-1]
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    blocks = (counts + BLOCK - 1) // BLOCK
    # An expert's first slot less its first pair: how far its pairs move to make room for the padding before them.
    shift = (blocks.cumsum(0) - blocks) * BLOCK - (counts.cumsum(0) - counts)
    slot_of_pair = torch.empty_like(order)
    slot_of_pair[order] = torch.arange(order.numel()) + shift[flat[order]]
    pair_of_slot = torch.full((int(blocks.sum()) * BLOCK,), order.numel())
    pair_of_slot[slot_of_pair] = torch.arange(order.numel())
    expert = torch.repeat_interleave(torch.arange(experts), blocks)
    bounds = [0, *(blocks.cumsum(0) * BLOCK).tolist()]
    return _Blocks(expert, pair_of_slot // top_k, pair_of_slot, slot_of_pair, bounds)


def grouped_experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """hidden (T, H), ids and weights (T, k) -> (T, H), as transformers' experts interface asks."""
    tokens, top_k = top_k_index.shape
    blocks = _blocks(top_k_index, int(experts.num_experts))
    rows = _Gather.apply(hidden, blocks.token_of_slot, blocks.slot_of_pair, top_k).view(-1, BLOCK, hidden.shape[-1])
    gate, up = _BlockLinear.apply(rows, experts.gate_up_proj, blocks.expert, blocks.bounds).chunk(2, dim=-1)
    out = _BlockLinear.apply(nn.functional.silu(gate) * up, experts.down_proj, blocks.expert, blocks.bounds)
    out = out.view(-1, hidden.shape[-1])
    out = _Gather.apply(out, blocks.slot_of_pair, blocks.pair_of_slot, 1).view(tokens, top_k, -1)
    return torch.bmm(top_k_weights.unsqueeze(1), out).squeeze(1)


def use_grouped_experts(model: Any) -> None:
    """Let this model's MoE layers run through `grouped_experts`."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
    model.set_experts_implementation(NAME)
