"""The per-layer half of the guided network (ours): evidence from next gate and history, and a learned drift."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vismmoe.predictors.features import PredictorInputs, gate_evidence, history_evidence
from vismmoe.predictors.options import PredictorConfig
from vismmoe.types import ModelSpec


class Guide(nn.Module):
    """The per-layer half of the guided network: evidence from next gate and history, and a learned drift."""

    def __init__(self, config: PredictorConfig, spec: ModelSpec, folded: bool = False) -> None:
        super().__init__()
        layers, experts, window, hidden = len(spec.moe_layers), spec.num_experts, config.window, spec.hidden_size
        self.window = window
        self.use_gate = config.use_next_gate
        self.use_history = config.use_history
        self.use_token = config.use_token_state
        self.folded = folded
        if not folded:
            self.token_mean = nn.Buffer(torch.zeros(hidden))
            self.token_scale = nn.Buffer(torch.ones(hidden))
        # first axis: prefill (0) and decode (1), whose evidence means different things
        self.gate_scale = nn.Parameter(torch.ones(2, layers, window))
        self.history_scale = nn.Parameter(torch.full((2, layers, window), 0.1))
        self.drift_scale = nn.Parameter(torch.tensor([0.0, 1.0]).view(2, 1, 1).expand(2, layers, window).clone())
        prior = spec.top_k / spec.num_experts
        self.bias = nn.Parameter(torch.full((2, layers, window, experts), prior).logit())
        self.out = nn.Parameter(torch.zeros(layers, config.hidden_sizes[1], window * experts))
        if self.use_token:
            self.down = nn.Parameter(torch.randn(layers, hidden, config.rank) / hidden**0.5)
            self.up = nn.Parameter(torch.zeros(layers, config.rank, window * experts))

    def forward(self, z: Tensor, inputs: PredictorInputs) -> Tensor:
        """z: (B, h2) from the trunk. Returns (B, W, E) logits."""
        phase, row = inputs.decode.long(), inputs.row
        out = self._of(self.bias, phase, row)
        if self.use_history:
            out = out + self._of(self.history_scale, phase, row) * history_evidence(inputs.ahead)
        if self.use_gate:
            out = out + self._of(self.gate_scale, phase, row) * gate_evidence(inputs.next_gate, inputs.decode)
        if self.use_token:
            token = inputs.token if self.folded else (inputs.token - self.token_mean) * self.token_scale
            drift = per_layer(row, token, self.down, self.up).view_as(out)
            out = out + self._of(self.drift_scale, phase, row) * drift
        return out + per_layer(row, z, self.out).view_as(out)

    def folded_weights(self) -> dict[str, Tensor]:
        """The scaling of the token state inside `down`, what it leaves over inside `bias`."""
        state = {name: value.detach() for name, value in self.named_parameters()}
        if self.use_token:
            state["down"] = state["down"] * self.token_scale.unsqueeze(-1)
            left_over = (self.token_mean @ state["down"]).unsqueeze(1) @ state["up"]  # (L, 1, W * E)
            scale = self.drift_scale.detach().unsqueeze(-1)
            state["bias"] = state["bias"] - scale * left_over.view(len(left_over), self.window, -1)
        return state

    def _of(self, table: Tensor, phase: Tensor, row: Tensor) -> Tensor:
        """(2, L, W) or (2, L, W, E) -> (B, W, 1 or E), each call's own phase and layer."""
        index = phase * table.shape[1] + row
        return F.embedding(index, table.flatten(2).flatten(0, 1)).view(len(row), self.window, -1)


def per_layer(row: Tensor, x: Tensor, *weights: Tensor) -> Tensor:
    """x through the matrices of its own layer. row: (B,); x: (B, n); weights: (L, n, m), (L, m, o) ...: (B, o)."""
    if len(x) == 1:  # serving: one call, one layer
        for weight in weights:
            x = x @ weight[int(row)]
        return x
    order = torch.argsort(row, stable=True)
    present, sizes = torch.unique_consecutive(row[order], return_counts=True)
    chosen = list(zip(*(weight.unbind() for weight in weights), strict=True))  # unbind: one gradient for all layers
    outs = []
    for layer, part in zip(present.tolist(), torch.split(x[order], sizes.tolist()), strict=True):
        for weight in chosen[layer]:
            part = part @ weight
        outs.append(part)
    return torch.cat(outs)[torch.argsort(order)]
