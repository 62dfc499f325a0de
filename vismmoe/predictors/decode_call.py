"""One decoded token through an exported network, in as few operations as it takes.

The same arithmetic as LookaheadNet.forward on a batch of one (a test compares them). All that reads the token's state,
the first layer, the drift and the routers of the layers ahead, reads it through one matrix product a layer: onto
`token_rank` directions in which that layer's states vary, which are all of them when the state is no wider. What does
not change while a request decodes (the retained tokens) is added up once a layer and request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vismmoe.predictors.features import DECODE_FLOOR, columns, history_evidence, recent_histogram
from vismmoe.predictors.guide import Guide
from vismmoe.types import LayerState

if TYPE_CHECKING:
    from vismmoe.predictors.lookahead import LookaheadNet
    from vismmoe.predictors.next_gate import NextGate


@dataclass(frozen=True)
class _Layer:
    """One layer's weights; r directions, w distances that exist ahead of it, h1 and h2 widths of the trunk."""

    project: Tensor | None  # (r, H); None: the state as it is
    first_bias: Tensor  # (h1,)
    first_token: Tensor | None  # (h1, r)
    down: Tensor | None  # (rank, r)
    out: Tensor  # (w * E, h2 + rank): the layer's head on the trunk, then the drift
    bias: Tensor  # (w * E,)
    history_scale: Tensor | None  # (w, 1)
    gate: Tensor | None  # (w * E, r)
    gate_bias: Tensor | None  # (w * E,)
    gate_scale: Tensor | None  # (w, 1)


class DecodeCall:
    """Made once a network and checkpoint; not to be shared by threads (it remembers the request's static part)."""

    def __init__(self, net: LookaheadNet, gate: NextGate | None = None) -> None:
        """gate: the checkpoint's routers, when the network asks them."""
        config = net.config
        self._window, self._experts = config.window, net.experts
        first, second = (cast(nn.Linear, net.trunk[index]) for index in (0, 2))
        parts = columns(config, net.layers, net.experts, net.hidden_size)
        self._recent, self._mean, self._summary = (
            first.weight[:, parts[name]].contiguous() if name in parts else None
            for name in ("recent", "retained_mean", "visual_summary")
        )
        self._w2, self._b2 = second.weight, second.bias
        self._layers = [_layer(net, gate, row, parts) for row in range(net.layers)]
        self._static: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._floor, self._uniform = math.log(DECODE_FLOOR), math.log(net.experts)

    def __call__(self, state: LayerState, row: int) -> Tensor:
        """(w, E) logits, w = the layers that exist ahead of MoE layer `row` (one row for a single head)."""
        layer = self._layers[row]
        token = state.hidden[0].float()
        if layer.project is not None:
            token = torch.mv(layer.project, token)
        z = self._static_part(state, row)
        if self._recent is not None:
            z = torch.addmv(z, self._recent, recent_histogram(state.history, row, self._window))
        if layer.first_token is not None:
            z = torch.addmv(z, layer.first_token, token)
        z = torch.addmv(self._b2, self._w2, z.relu()).relu_()
        if layer.down is not None:
            z = torch.cat((z, torch.mv(layer.down, token)))
        out = torch.addmv(layer.bias, layer.out, z).view(-1, self._experts)
        if layer.history_scale is not None:
            ahead = state.history[row + 1 : row + 1 + self._window]
            out.addcmul_(history_evidence(ahead), layer.history_scale)
        if layer.gate is None or layer.gate_bias is None or layer.gate_scale is None:
            return out
        logits = torch.addmv(layer.gate_bias, layer.gate, token).view(-1, self._experts)
        evidence = logits.log_softmax(-1).clamp_(min=self._floor).add_(self._uniform)
        return out.addcmul_(evidence, layer.gate_scale)

    def _static_part(self, state: LayerState, row: int) -> Tensor:
        """The first layer's sum over what stays the same while a request decodes: layer, phase, retained tokens."""
        known = self._static.get(row)
        if known is not None and known[0] is state.retained_mean and known[1] is state.visual_summary:
            return known[2]
        total = self._layers[row].first_bias
        if self._mean is not None:
            total = torch.addmv(total, self._mean, state.retained_mean.float())
        if self._summary is not None:
            total = torch.addmv(total, self._summary, state.visual_summary.float())
        self._static[row] = state.retained_mean, state.visual_summary, total
        return total


def _layer(net: LookaheadNet, gate: NextGate | None, row: int, parts: dict[str, slice]) -> _Layer:
    first = cast(nn.Linear, net.trunk[0])
    basis, mean = net.token_basis, net.token_centre
    back = None if basis is None else basis[row].detach()  # (H, r)
    centre = None if mean is None else mean[row].detach()
    bias = first.bias.detach()
    if "layer" in parts:
        bias = bias + first.weight[:, parts["layer"]][:, row]
    if "phase" in parts:
        bias = bias + first.weight[:, parts["phase"]][:, 0]
    token = first.weight[:, parts["token"]].detach() if "token" in parts else None
    token, offset = _through(token, back, centre)
    head = _head(net, row) if net.guide is None else _guided(net.guide, row, gate, back, centre)
    asked = token is not None or head.get("down") is not None or head.get("gate") is not None
    project = back.T.contiguous() if back is not None and asked else None
    return _Layer(project=project, first_bias=bias if offset is None else bias + offset, first_token=token, **head)  # type: ignore[arg-type]


def _head(net: LookaheadNet, row: int) -> dict[str, Tensor | None]:
    """The published linear head: the same for all layers."""
    assert net.head is not None
    nothing = dict.fromkeys(("down", "history_scale", "gate", "gate_bias", "gate_scale"))
    return {**nothing, "out": net.head.weight.detach(), "bias": net.head.bias.detach()}


def _guided(
    guide: Guide, row: int, gate: NextGate | None, back: Tensor | None, centre: Tensor | None
) -> dict[str, Tensor | None]:
    """The guided network's tables of one layer, decode only, cut to the layers that exist."""
    ahead = min(guide.window, len(guide.bias[1]) - 1 - row)
    experts = guide.bias.shape[-1]
    size = ahead * experts
    found: dict[str, Tensor | None] = {
        "bias": guide.bias[1, row, :ahead].detach().flatten().clone(),
        "out": guide.out[row].detach()[:, :size].T.contiguous(),
        "history_scale": guide.history_scale[1, row, :ahead].detach().unsqueeze(-1) if guide.use_history else None,
        "down": None,
        "gate": None,
        "gate_bias": None,
        "gate_scale": None,
    }
    if guide.use_token:
        scale = guide.drift_scale[1, row, :ahead].detach().repeat_interleave(experts).unsqueeze(-1)
        up = guide.up[row].detach()[:, :size].T * scale  # (w * E, rank)
        down, offset = _through(guide.down[row].detach().T, back, centre)
        assert found["out"] is not None
        assert found["bias"] is not None
        found["down"], found["out"] = down, torch.cat((found["out"], up), dim=1).contiguous()
        if offset is not None:
            found["bias"] = found["bias"] + up @ offset
    if guide.use_gate:
        assert gate is not None
        routers, offset = _through(gate.weights_ahead(row, ahead).flatten(0, 1), back, centre)
        found["gate"], found["gate_scale"] = routers, guide.gate_scale[1, row, :ahead].detach().unsqueeze(-1)
        found["gate_bias"] = torch.zeros(size) if offset is None else offset
    return found


def _through(weight: Tensor | None, back: Tensor | None, centre: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(n, H) -> (n, r) for states given by their coordinates, and what their mean adds: (n,)."""
    if weight is None or back is None or centre is None:
        return None if weight is None else weight.contiguous(), None
    inner = weight @ back
    return inner.contiguous(), weight @ centre - inner @ (back.T @ centre)
