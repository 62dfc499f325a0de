"""Chance: a random list, the floor that every predictor must clear (expected Hot Recall@k: k / E)."""

from __future__ import annotations

import torch
from torch import Tensor

from vismmoe.types import LayerState, ModelSpec


class Chance:
    """Implements types.Predictor; seeded, so a run repeats."""

    kind = "chance"

    def __init__(self, spec: ModelSpec, window: int = 5, seed: int = 0) -> None:
        self.window = window
        self._experts = spec.num_experts
        self._generator = torch.Generator().manual_seed(seed)

    def predict(self, state: LayerState) -> Tensor:
        """(W, E) float32, uniform in [0, 1)."""
        return torch.rand(self.window, self._experts, generator=self._generator)
