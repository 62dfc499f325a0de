"""After training: experts that hardly any token chooses are drawn into use by the least change of their router's rows.

Training revives experts too (`terms.neglect`), but leaves off at an arbitrary step, and of the 128 experts of a
layer one was always just passed over.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import Qwen3VLMoeForConditionalGeneration

from vismmoe_training.reference.dialogue import DialogueBatch
from vismmoe_training.reference.whole import decode, watching_routers


@torch.no_grad()
def revive(
    model: Qwen3VLMoeForConditionalGeneration,
    requests: Iterable[tuple[DialogueBatch, Tensor]],
    *,
    least: float = 0.2,
    rounds: int = 4,
) -> int:
    """Give every expert at least about `least` of the uniform share over these requests; how many rows were moved.

    All layers at once, in rounds: what changes in one layer changes a little of what the next ones see.
    """
    kept, moved = list(requests), 0
    for _ in range(rounds):
        inputs = _router_inputs(model, kept)
        raised = [
            _raise_rows(layer.mlp.gate, seen, least)
            for layer, seen in zip(model.model.language_model.layers, inputs, strict=True)
        ]
        moved += sum(raised)
        if not any(raised):
            break
    return moved


def _router_inputs(
    model: Qwen3VLMoeForConditionalGeneration, requests: Iterable[tuple[DialogueBatch, Tensor]]
) -> list[Tensor]:
    """(tokens, H) of each layer: pictures, and the first question about each."""
    seen: list[list[Tensor]] = []
    for dialogues, visual in requests:
        routed: list[tuple[Tensor, ...]] = []
        with watching_routers(model, routed):
            decode(model, dialogues, visual)
        counted = ((dialogues.branch == 0) | (dialogues.branch == 1)).reshape(-1)
        seen.append([inputs.reshape(-1, inputs.shape[-1])[counted] for inputs, *_ in routed])
    return [torch.cat(parts) for parts in zip(*seen, strict=True)]


def _raise_rows(gate: torch.nn.Module, inputs: Tensor, least: float) -> int:
    """Move the rows of the experts in want along the mean input, until so many tokens as they lack choose them."""
    weight, top_k = gate.weight, int(gate.top_k)  # type: ignore[arg-type]
    assert isinstance(weight, Tensor)
    logits = inputs @ weight.t()
    best = logits.topk(top_k, dim=-1)
    wanted = round(least * best.indices.numel() / weight.shape[0])
    poor = (torch.bincount(best.indices.reshape(-1), minlength=weight.shape[0]) < wanted).nonzero().flatten()
    if not wanted or not len(poor):
        return 0
    # So many tokens have a smaller gap to the last of the chosen than the one found here.
    gaps = (best.values[:, -1:] - logits[:, poor]).kthvalue(wanted, dim=0).values
    mean = inputs.mean(0)
    weight[poor] += (1.05 * gaps.clamp(min=0)).unsqueeze(1) * mean / mean.square().sum()
    return len(poor)
