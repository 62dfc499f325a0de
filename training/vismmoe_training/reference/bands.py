"""Running routing figures of the training batches, and how hard each term may pull on each layer because of them.

A routing term pulls on a layer only while that layer lies outside its band (or nearer to its edge than a margin);
inside, nothing distracts the layer from answering. `routing.BANDS` holds the bands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vismmoe_training.reference.routing import BANDS, TOP

FARTHEST = 4.0  # greatest pull, in ramps


@dataclass(frozen=True)
class Margins:
    """How far inside its band a figure should lie before its term lets go."""

    least_share: float = 0.10
    coverage_visual: float = 0.08
    coverage_text: float = 0.05
    next_gate: float = 0.06
    ramp: float = 0.06  # of distance makes a pull of 1
    floor: float = 0.2  # least pull of least_share: what is revived must not be dropped again at once


class RunningBands(nn.Module):
    """Exponential means of one training's routing figures, per layer; buffers, so a resumed run goes on with them."""

    load: Tensor
    coverage_visual: Tensor
    coverage_text: Tensor
    next_gate: Tensor
    batches: Tensor

    def __init__(self, layers: int, experts: int, margins: Margins | None = None, keep: float = 0.9) -> None:
        super().__init__()
        self.margins, self.keep = margins or Margins(), keep
        self.register_buffer("load", torch.ones(layers, experts))
        for name, count in (("coverage_visual", layers), ("coverage_text", layers), ("next_gate", layers - 1)):
            self.register_buffer(name, torch.zeros(count))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def note(self, chosen: Tensor, guessed: Tensor, visual: Tensor, text: Tensor) -> None:
        """chosen (L, B, T, k), guessed (L - 1, B, T, k) for layers 1 on; (B, T) masks of one request each."""
        self._mix("coverage_visual", self._coverage(chosen, visual))
        self._mix("coverage_text", self._coverage(chosen, text))
        counted = visual | text
        own, early = chosen[1:, counted], guessed[:, counted]
        self._mix("next_gate", (own[..., :, None] == early[..., None, :]).any(-1).float().mean((-1, -2)))
        load = _histogram(chosen[:, counted].unsqueeze(1), self.load.shape[1]).squeeze(1)
        self._mix("load", load / load.sum(-1, keepdim=True) * load.shape[1])
        self.batches += 1

    @property
    def least_share(self) -> Tensor:
        """(L,) share of the least used expert, as a part of the uniform share."""
        return self.load.amin(-1)

    def pulls(self) -> Mapping[str, Tensor]:
        """(L,) pull on each layer: 0 inside the band, rising with the distance below it, negative above it.

        That of `next_gate` stands with the layer that chose, not with the one that could have foreseen it.
        """
        pulls = {name: self._pull(name) for name in ("least_share", "coverage_visual", "coverage_text", "next_gate")}
        pulls["least_share"] = pulls["least_share"].clamp(min=self.margins.floor)
        pulls["next_gate"] = nn.functional.pad(pulls["next_gate"], (1, 0))
        return pulls

    def _pull(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name)
        low, high = BANDS[name]
        margin, ramp = float(getattr(self.margins, name)), self.margins.ramp
        below = ((low + margin - value) / ramp).clamp(0, FARTHEST)
        above = ((value - high + margin) / ramp).clamp(0, FARTHEST)
        return below - above

    def _coverage(self, chosen: Tensor, mask: Tensor) -> Tensor:
        rows = mask.any(1)
        counts = _histogram(chosen[:, rows], self.load.shape[1], mask[rows])
        return (counts.topk(min(TOP, counts.shape[-1])).values.sum(-1) / counts.sum(-1)).mean(-1)

    def _mix(self, name: str, value: Tensor) -> None:
        own = getattr(self, name)
        own.lerp_(value, 1.0 if int(self.batches) == 0 else 1 - self.keep)


def _histogram(chosen: Tensor, experts: int, mask: Tensor | None = None) -> Tensor:
    """(L, B, T, k) ids -> (L, B, E) counts of the tokens in mask (B, T)."""
    each = torch.ones(chosen.shape[1:3]) if mask is None else mask.float()
    each = each.unsqueeze(-1).expand(chosen.shape).reshape(*chosen.shape[:2], -1)
    return torch.zeros(*chosen.shape[:2], experts).scatter_add_(2, chosen.reshape(*chosen.shape[:2], -1), each)
