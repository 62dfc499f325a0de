"""Saliency of visual tokens: the attention each one receives in the vision tower (VisMMoE §4.1).

Qwen's tower has no class token; its own softmax attention in one block is averaged over heads and querying patches,
then over the patches that are merged into one visual token.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

BLOCK_BYTES = 1024**2  # most that one block of attention rows may take


def packed_saliency(
    attention: nn.Module, hidden: Tensor, kwargs: Mapping[str, Any], merge: int, inputs: Mapping[str, Tensor]
) -> Tensor:
    """`received_attention` of Qwen's tower, whose patches of all images lie one after another."""
    return received_attention(attention, hidden, kwargs["cu_seqlens"], kwargs["position_embeddings"], merge**2)


def received_attention(
    attention: nn.Module,
    hidden: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    merge_unit: int,
) -> Tensor:
    """Attention that each visual token receives, relative to the uniform share (1.0), so that images of different
    sizes compare.

    hidden: (P, D) normed input of `attention`, P patches of all images; cu_seqlens: (images + 1,) int32;
    merge_unit: patches per visual token, neighbours in the patch order. Returns (P / merge_unit,) float32.
    """
    query, key = _rotated(attention, hidden, position_embeddings)
    edges = cu_seqlens.tolist()
    scaling = float(attention.scaling)  # type: ignore[arg-type]
    received = [mean_received(query[:, first:last], key[:, first:last], scaling) for first, last in pairwise(edges)]
    return torch.cat(received).reshape(-1, merge_unit).mean(1)


def scale_to_unit(received: Tensor) -> Tensor:
    """s~ in [0, 1] over the request's visual tokens; zeros when all are equal. (N,) -> (N,) float32."""
    if not received.numel():
        return received
    low, high = received.min(), received.max()
    return (received - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)


def _rotated(attention: nn.Module, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Query and key (heads, P, d) float32 as the block itself computes them."""
    heads = int(attention.num_heads)  # type: ignore[arg-type]
    mixed = attention.qkv(hidden).reshape(len(hidden), 3, heads, -1)  # type: ignore[operator]
    query, key, _ = mixed.unbind(1)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb_vision
    query, key = rotate(query, key, *position_embeddings)
    return query.transpose(0, 1).float(), key.transpose(0, 1).float()


def mean_received(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """(P,) attention that each patch receives, relative to the uniform share; query and key (heads, P, d) float32."""
    heads, patches, _ = query.shape
    rows = max(1, BLOCK_BYTES // (heads * patches * 4))
    total = query.new_zeros(patches)
    for start in range(0, patches, rows):
        scores = query[:, start : start + rows] @ key.transpose(1, 2) * scaling
        total += scores.softmax(-1).sum((0, 1))
    return total / heads  # mean over heads and queries, times the number of patches
