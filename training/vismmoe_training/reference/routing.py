"""Does the model route like a real vision-language MoE? The figures that its model card reports.

All arrays are per layer. "Coverage" is the share of a request's (token, expert) choices in one layer that its own
twenty busiest experts receive (VisMMoE, section 2: text 0.77, raw visual tokens 0.45 on Qwen3-VL-30B-A3B).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TOP = 20
BANDS: Mapping[str, tuple[float, float]] = {  # in which the figures of real models lie
    "least_share": (0.1, 1.0),
    "coverage_visual": (0.40, 0.60),
    "coverage_text": (0.60, 0.85),
    "previous_token_text": (0.0, 0.65),
    "next_gate": (0.75, 0.92),
}


@dataclass(frozen=True)
class RoutingFigures:
    """Means over held-out requests, one value a layer (next gate: one a layer but the last)."""

    least_share: tuple[float, ...]  # share of the least used expert, as a part of the uniform share
    coverage_visual: tuple[float, ...]
    coverage_text: tuple[float, ...]
    previous_token_visual: tuple[float, ...]  # experts of a token that its predecessor also chose
    previous_token_text: tuple[float, ...]
    next_gate: tuple[float, ...]  # recall@top-k of the next layer's router on this layer's state

    def failures(self) -> list[str]:
        """What lies outside the bands in which a real model's figures lie; empty when all is well."""
        return [
            f"{name} of layer {layer} is {value:.3f}, not within {low} to {high}"
            for name, (low, high) in BANDS.items()
            for layer, value in enumerate(getattr(self, name))
            if not low <= value <= high
        ]


class RoutingMeter:
    """Collects routing of requests; one per measurement."""

    def __init__(self, layers: int, experts: int) -> None:
        self.load = torch.zeros(layers, experts)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, chosen: Tensor, visual: Tensor, text: Tensor) -> None:
        """One request: chosen (L, T, k) ids, two (T,) masks."""
        self.load += _histogram(chosen, self.load.shape[1])
        for name, mask in (("visual", visual), ("text", text)):
            own = chosen[:, mask]
            counts = _histogram(own, self.load.shape[1])
            self._note(f"coverage_{name}", counts.topk(min(TOP, counts.shape[-1])).values.sum(-1) / counts.sum(-1))
            both = mask[1:] & mask[:-1]
            same = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).any(-1).float().mean(-1)
            self._note(f"previous_token_{name}", same[:, both].mean(-1))

    def add_next_gate(self, guessed: Tensor, chosen: Tensor) -> None:
        """guessed, chosen (L - 1, T, k): what the next router would choose a layer early, and what it chose."""
        self._note("next_gate", (chosen[..., :, None] == guessed[..., None, :]).any(-1).float().mean((-1, -2)))

    def figures(self) -> RoutingFigures:
        """The means so far."""
        share = self.load / self.load.sum(-1, keepdim=True) * self.load.shape[1]
        means = {name: tuple((total / self.counts[name]).tolist()) for name, total in self.sums.items()}
        return RoutingFigures(least_share=tuple(share.amin(-1).tolist()), **means)

    def _note(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value
        self.counts[name] = self.counts.get(name, 0) + 1


def _histogram(chosen: Tensor, experts: int) -> Tensor:
    """(L, T, k) ids -> (L, E) counts."""
    flat = chosen.reshape(chosen.shape[0], -1)
    return torch.zeros(chosen.shape[0], experts).scatter_add_(1, flat, torch.ones(flat.shape))
