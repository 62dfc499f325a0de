"""What the training asks of the routing, one value a layer and term; `bands.py` says when a layer is asked at all."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func


def imbalance(logits: Tensor, top_k: int) -> Tensor:
    """Switch balance loss of one layer's router logits (rows, E): 0 is even. transformers' own pools all layers."""
    value = torch.as_tensor(load_balancing_loss_func((logits,), logits.shape[-1], top_k))
    return value / top_k - 1


def imbalance_within(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The same within each sequence, mean over the B sequences (DeepSeek-V3's sequence-wise balance loss).

    logits (B * T, E), chosen ids (B * T, k), mask (B, T) of the tokens that count.
    """
    rows, length = mask.shape
    weight = mask.float() / mask.sum(1, keepdim=True).clamp(min=1)
    experts, top_k = logits.shape[-1], ids.shape[-1]
    share = torch.einsum("bte,bt->be", logits.softmax(-1).view(rows, length, -1), weight)
    place = ids + torch.arange(rows, device=ids.device).repeat_interleave(length).unsqueeze(1) * experts
    each = (weight / top_k).reshape(-1, 1).expand(-1, top_k)
    load = torch.bincount(place.reshape(-1), each.reshape(-1), minlength=rows * experts).view(rows, experts)
    return (share * load).sum(-1).mean() * experts - 1


def neglect(logits: Tensor, top_k: int, least: float = 0.4) -> Tensor:
    """How far experts of little use lie from being chosen by the tokens that would soonest choose them.

    logits (rows, E). Balance terms even out probabilities, which can be even
    while an expert never reaches the top-k; and raised for all tokens alike it is soon chosen by all. So each expert
    with less than `least` of the uniform share is drawn over the line of choice for just as many tokens as it lacks.
    """
    best = logits.topk(top_k, dim=-1)
    load = torch.bincount(best.indices.reshape(-1), minlength=logits.shape[1])
    count = max(1, round(least * best.indices.numel() / logits.shape[1]))
    poor = load < count
    if not bool(poor.any()):
        return logits.new_zeros(())
    line = best.values[:, -1:].detach()
    gaps = (line - logits[:, poor]).topk(count, dim=0, largest=False).values
    return nn.functional.softplus(gaps).mean(0).sum() / logits.shape[1]


def indecision(logits: Tensor, top_k: int) -> Tensor:
    """How near the chosen experts of each token (rows, E) lie to the runners-up: 0 where the choice is clear-cut.

    Balance terms alone are content with flat logits, whose top-k hangs on noise and cannot be foreseen. Each of the k
    chosen and of the k next is pushed away from the line between them, so all k are decided and not the first alone.
    """
    best = logits.topk(2 * top_k, dim=-1).values
    line = ((best[:, top_k - 1] + best[:, top_k]) / 2).detach().unsqueeze(1)
    chosen, runners_up = best[:, :top_k], best[:, top_k:]
    return (nn.functional.softplus(line - chosen) + nn.functional.softplus(runners_up - line)).mean()


def surprise(early: Tensor, late: Tensor, top_k: int) -> Tensor:
    """How clearly a router would have chosen otherwise one layer earlier; both (rows, E), 0 where it would not have.

    What it chooses late should have stood above the early line of choice, what it then leaves out below. (One minus the
    correlation of the two says little: it is .01 where a third of the choices differ.)
    """
    near = early.topk(2 * top_k, dim=-1)
    line = near.values[:, top_k - 1 : top_k + 1].mean(-1, keepdim=True).detach()
    above = early - line
    wanted = torch.zeros_like(early, dtype=torch.bool).scatter_(1, late.topk(top_k, dim=-1).indices, True)
    close = torch.zeros_like(wanted).scatter_(1, near.indices, True) & ~wanted
    missed, mistaken = nn.functional.softplus(-above) * wanted, nn.functional.softplus(above) * close
    return (missed + mistaken).sum(-1).mean() / (2 * top_k)
