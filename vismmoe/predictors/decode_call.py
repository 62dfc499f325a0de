"""One decoded token through an exported network, in as few operations as it takes.

The same arithmetic as LookaheadNet.forward on a batch of one (a test compares them): while a small model decodes, it is
the number of operations and not their size that a call costs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vismmoe.predictors.features import DECODE_FLOOR, history_evidence, recent_histogram
from vismmoe.predictors.guide import Guide
from vismmoe.types import LayerState

if TYPE_CHECKING:
    from vismmoe.predictors.lookahead import LookaheadNet


class DecodeCall:
    """Holds views of the network's weights, and one small table: the first layer's bias for each model layer."""

    def __init__(self, net: LookaheadNet) -> None:
        first, second = (cast(nn.Linear, net.trunk[index]) for index in (0, 2))
        config = net.config
        self._config = config
        self._head = None if net.head is None else (net.head.bias, net.head.weight)
        self._weights = {} if net.guide is None else _decode_weights(net.guide)
        width = first.weight.shape[1] - config.use_layer * net.layers - config.use_phase
        self._w1, self._w2, self._b2 = first.weight[:, :width], second.weight, second.bias
        bias = first.bias + first.weight[:, -1] if config.use_phase else first.bias
        self._b1 = bias.expand(net.layers, -1)
        if config.use_layer:
            self._b1 = bias + first.weight[:, width : width + net.layers].T
        self._experts = net.experts
        self._floor = math.log(DECODE_FLOOR)

    def __call__(self, state: LayerState, row: int, gate_logits: Tensor | None) -> Tensor:
        """(w, E) logits, w = the layers that exist ahead of MoE layer `row` (one row for a single head).

        gate_logits: (w, E), what the routers ahead say of this token; None when the network does not ask them.
        """
        token = state.hidden[0].float()
        z = torch.addmv(self._b1[row], self._w1, self._features(state, row, token)).relu_()
        z = torch.addmv(self._b2, self._w2, z).relu_()
        if self._head is not None:
            return torch.addmv(*self._head, z).view(-1, self._experts)
        return self._guided(state, row, token, z, gate_logits)

    def _features(self, state: LayerState, row: int, token: Tensor) -> Tensor:
        parts = [recent_histogram(state.history, row, self._config.window), state.retained_mean.float()]
        if self._config.use_visual_summary:
            parts.append(state.visual_summary.float())
        if self._config.use_token_state:
            parts.append(token)
        return torch.cat(parts)

    def _guided(self, state: LayerState, row: int, token: Tensor, z: Tensor, gate_logits: Tensor | None) -> Tensor:
        weights = self._weights
        window = self._config.window
        out = torch.addmv(weights["bias"][row].flatten(), weights["out"][row].T, z).view(window, -1)
        if "up" in weights:
            drift = torch.mv(weights["up"][row].T, torch.mv(weights["down"][row].T, token)).view(window, -1)
            out.addcmul_(drift, weights["drift_scale"][row])
        ahead = state.history[row + 1 : row + 1 + window]
        out = out[: len(ahead)]
        out.addcmul_(history_evidence(ahead), weights["history_scale"][row, : len(ahead)])
        if gate_logits is None:
            return out
        evidence = gate_logits.log_softmax(-1).clamp_(min=self._floor).add_(math.log(self._experts))
        return out.addcmul_(evidence, weights["gate_scale"][row, : len(ahead)])


def _decode_weights(guide: Guide) -> dict[str, Tensor]:
    """The guide's weights by name, of those with a phase only decode's; scales as columns."""
    weights = {name: value.detach() for name, value in guide.named_parameters()}
    for name in ("bias", "gate_scale", "history_scale", "drift_scale"):
        weights[name] = weights[name][1]
    return {name: value.unsqueeze(-1) if name.endswith("scale") else value for name, value in weights.items()}
