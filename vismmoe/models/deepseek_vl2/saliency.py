"""Saliency of DeepSeek-VL2's visual tokens: the attention each one receives within its view (VisMMoE §4.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vismmoe.models.deepseek_vl2.sequence import image_sequence, images_of
from vismmoe.models.saliency import mean_received


def view_saliency(
    attention: nn.Module, hidden: Tensor, kwargs: Mapping[str, Any], merge: int, inputs: Mapping[str, Tensor]
) -> Tensor:
    """(N,) float32 attention received by each row that stands for the prompt's images, relative to the uniform share.

    hidden: (views, P, D) normed input of `attention`; inputs: of the processor, one prompt. A patch is compared within
    its own view. A newline counts as its row's mean, the separator as the mean of all, so that neither is preferred.
    """
    received = torch.stack([_received(attention, view, merge) for view in hidden])
    unset = received.new_full((1,), torch.nan)
    rows = [
        _filled(image_sequence(received[first : first + 1 + w * h].unsqueeze(-1), (w, h), unset, unset).squeeze(-1))
        for first, (w, h) in images_of(inputs["images_spatial_crop"][0])
    ]
    return torch.cat(rows)


def _received(attention: Any, view: Tensor, merge: int) -> Tensor:
    """(P, D) -> (s * s,): mean over the patches that become one visual token; padding is none of them."""
    heads = int(attention.num_heads)
    query, key = (
        project(view).view(len(view), heads, -1).transpose(0, 1).float()
        for project in (attention.q_proj, attention.k_proj)
    )
    side = math.isqrt(len(view))
    patches = mean_received(query, key, float(attention.scale)).view(1, 1, side, side)
    return functional.avg_pool2d(patches, merge, ceil_mode=True, count_include_pad=False).flatten()


def _filled(rows: Tensor) -> Tensor:
    """NaN stands for newlines and the separator: each newline closes a row that began after the one before."""
    out, start = rows.clone(), 0
    for end in rows.isnan().nonzero().flatten().tolist():
        out[end] = rows[start:end].mean() if end > start else rows.nanmean()
        start = end + 1
    return out
