"""What a measured model is watched and steered by, alike in all systems: its forward hooks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vismmoe.bench.replay import Replay, ReplayedPredictor, respread
from vismmoe.models.catalogue import Family

_IO = Path("/proc/self/io")


def bytes_from_disk() -> int:
    """What this process has had the disk read so far, page faults and read-ahead included; 0 where it is not told."""
    try:
        lines = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(lines["read_bytes"])
    except (OSError, KeyError, ValueError):
        return 0


class StepClock:
    """Time and bytes at the start of a request and at the end of each forward."""

    def __init__(self, model: nn.Module) -> None:
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        model.register_forward_hook(lambda *_: self.mark())

    def mark(self) -> None:
        self.seconds.append(time.perf_counter())
        self.bytes.append(bytes_from_disk())


class ReplayedRouters:
    """Every router says what was logged instead of what it thinks."""

    def __init__(self, model: nn.Module, family: Family, replay: Replay, predictor: ReplayedPredictor | None) -> None:
        self._replay = replay
        self._predictor = predictor
        self._step = -1
        layers: Any = model.get_submodule(family.layers)
        routers = [found for layer in layers if (found := dict(layer.named_modules()).get(family.router)) is not None]
        for row, router in enumerate(routers):
            router.register_forward_hook(self._hook(row))

    def _hook(self, row: int) -> Any:
        def hook(module: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            if row == 0:
                self._step += 1
                if self._predictor is not None:
                    self._predictor.step = self._step
            logits, weights, _ = output
            if self._step == 0:
                chosen = respread(self._replay.prefill[row], len(logits), weights.shape[-1], logits.shape[-1])
                return logits, torch.full_like(weights, 1 / weights.shape[-1]), chosen.to(logits.device)
            place = min(self._step, self._replay.steps - 1) - 1
            shares = self._replay.weights[place, row].to(weights)
            return logits, shares.unsqueeze(0), self._replay.experts[place, row].unsqueeze(0).to(logits.device)

        return hook


def settle_seed() -> None:
    """Greedy runs need none; libraries that ask for one all get the same."""
    torch.manual_seed(0)
