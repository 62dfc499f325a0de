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
from vismmoe.types import LayerState

if TYPE_CHECKING:
    from vismmoe.predictors.lookahead import LookaheadNet


class DecodeCall:
    """Holds views of the network's weights, and one small table: the first layer's bias for each model layer."""

    def __init__(self, net: LookaheadNet) -> None:
        first, second = (cast(nn.Linear, net.trunk[index]) for index in (0, 2))
        config = net.config
        self._config, self._guide, self._head = config, net.guide, net.head
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
        if self._guide is None:
            assert self._head is not None
            return torch.addmv(self._head.bias, self._head.weight, z).view(-1, self._experts)
        return self._guided(state, row, token, z, gate_logits)

    def _features(self, state: LayerState, row: int, token: Tensor) -> Tensor:
        parts = [recent_histogram(state.history, row, self._config.window), state.retained_mean.float()]
        if self._config.use_visual_summary:
            parts.append(state.visual_summary.float())
        if self._config.use_token_state:
            parts.append(token)
        return torch.cat(parts)

    def _guided(self, state: LayerState, row: int, token: Tensor, z: Tensor, gate_logits: Tensor | None) -> Tensor:
        guide = self._guide
        assert guide is not None
        out = torch.addmv(guide.bias[1, row].flatten(), guide.out[row].T, z).view(guide.window, -1)
        if guide.use_token:
            drift = torch.mv(guide.up[row].T, torch.mv(guide.down[row].T, token)).view_as(out)
            out.addcmul_(drift, guide.drift_scale[1, row].unsqueeze(-1))
        ahead = state.history[row + 1 : row + 1 + guide.window]
        out = out[: len(ahead)]
        out.addcmul_(history_evidence(ahead), guide.history_scale[1, row, : len(ahead)].unsqueeze(-1))
        if gate_logits is None:
            return out
        evidence = gate_logits.log_softmax(-1).clamp_(min=self._floor).add_(math.log(self._experts))
        return out.addcmul_(evidence, guide.gate_scale[1, row, : len(ahead)].unsqueeze(-1))
