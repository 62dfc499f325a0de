"""Routing logs of an imagined model whose states drift from layer to layer by a rule that can be learnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from vismmoe.predictors.next_gate import NextGate
from vismmoe.trace import TraceHeader, TraceWriter
from vismmoe.types import ModelSpec, RequestRecord, RoutingRecord

WriteLogs = Callable[..., Path]


class ImaginedModel:
    """Residual layers x + 0.6 tanh(A x), a router each; tokens of a request resemble the ones before them."""

    def __init__(self, layers: int = 5, experts: int = 32, hidden: int = 24, top_k: int = 4, seed: int = 0) -> None:
        self.spec = ModelSpec("imagined", layers, tuple(range(layers)), experts, top_k, hidden, 8, f"{seed:064x}")
        self._random = torch.Generator().manual_seed(seed)
        self._mix = [self._noise(hidden, hidden) / hidden**0.5 * 2 for _ in range(layers)]
        self.routers = {layer: self._noise(experts, hidden) * 2 / hidden**0.5 for layer in range(layers)}
        self._gate = NextGate(self.spec, self.routers, window=4)

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)

    def request(self, item: str, tokens: int = 12, steps: int = 5) -> tuple[RequestRecord, list[RoutingRecord]]:
        theme = self._noise(1, self.spec.hidden_size)
        state, rows = theme + self._noise(tokens, self.spec.hidden_size), []
        summary, means = state.mean(0), {}
        for step in range(steps):
            x = state
            for layer in self.spec.moe_layers:
                hidden = x / x.pow(2).mean(-1, keepdim=True).sqrt()
                means.setdefault(layer, hidden.mean(0))
                rows.append(self._row(step, layer, hidden, means[layer]))
                x = x + 0.6 * torch.tanh(x @ self._mix[layer])
            state = 0.5 * state[-1:] + 0.5 * theme + self._noise(1, self.spec.hidden_size)
        return RequestRecord(0, item, "What is this?", "a cat", tokens, tokens, steps, summary), rows

    def _row(self, step: int, layer: int, hidden: Tensor, mean: Tensor) -> RoutingRecord:
        shares = (hidden @ self.routers[layer].T).softmax(-1)
        top = shares.topk(self.spec.top_k, dim=-1)
        counts = torch.bincount(top.indices.flatten(), minlength=self.spec.num_experts)
        mass = torch.zeros(self.spec.num_experts).index_add_(0, top.indices.flatten(), top.values.flatten())
        phase = "prefill" if step == 0 else "decode"
        ahead = self._gate.masses(layer, hidden)
        own = self._gate.here(layer, hidden)
        return RoutingRecord(0, step, phase, layer, counts.int(), mass, mean, hidden[-1], own, ahead)


@pytest.fixture
def write_logs(tmp_path: Path) -> WriteLogs:
    """Write a folder of routing logs: write_logs(items=8, name="logs", seed=0, keep_ratio=1.0, ...)."""

    def write(items: int = 8, name: str = "logs", seed: int = 0, keep_ratio: float = 1.0, steps: int = 5) -> Path:
        model = ImaginedModel(seed=seed)
        header = TraceHeader(model.spec, keep_ratio, "affinity", 4)
        with TraceWriter(tmp_path / name, header, shard_items=5) as writer:
            for index in range(items):
                writer.add(*model.request(f"image-{index}.png", steps=steps))
        return tmp_path / name

    return write


@pytest.fixture
def imagined_gate() -> NextGate:
    """Next gate with the routers of the model behind write_logs(seed=0), three layers ahead."""
    model = ImaginedModel(seed=0)
    return NextGate(model.spec, model.routers, window=3)
