"""One decoded token through an exported network, in as few operations as it takes.

The same arithmetic as LookaheadNet.forward on a batch of one (a test compares them). The token's state is brought onto
`token_rank` directions in which that layer's states vary (all of them when the state is no wider); the first layer, the
drift and the routers of the layers ahead then read it in one matrix product. What does not change while a request
decodes (the retained tokens) is added up once a layer and request.

A call is as long as its weights are to read and its operations are to start, about alike: hence float32 (torch's
product of a matrix and one bfloat16 row is slower), factors that lie ready in their full shape, and nothing twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from vismmoe.predictors.features import DECODE_FLOOR, columns, history_evidence
from vismmoe.predictors.guide import Guide
from vismmoe.types import LayerState

if TYPE_CHECKING:
    from vismmoe.predictors.lookahead import LookaheadNet
    from vismmoe.predictors.next_gate import NextGate


@dataclass(frozen=True)
class _Layer:
    """One layer's weights; r directions, w distances that exist ahead of it, h1 and h2 widths of the trunk."""

    project: Tensor | None  # (r, H); None: the state as it is
    read: Tensor | None  # (h1? + rank? + w * E?, r): what the first layer, the drift and the routers read
    widths: list[int]  # three: how many rows of `read` are for which; 0: not at all
    read_bias: Tensor  # one for each row of `read`; without any, (h1,) for the first layer
    out: Tensor  # (w * E, h2 + rank): the layer's head on the trunk, then the drift
    bias: Tensor  # (w * E,), the constants of all evidence included
    history_scale: Tensor | None  # (w, E)
    gate_scale: Tensor | None  # (w, E)


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
        # of 1 to W rows of the history: as features.recent_histogram, in fewer steps than a mean
        self._even = [torch.full((rows,), 1 / max(rows, 1)) for rows in range(self._window + 1)]
        self._static: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._floor = math.log(DECODE_FLOOR)

    def __call__(self, state: LayerState, row: int) -> Tensor:
        """(w, E) logits, w = the layers that exist ahead of MoE layer `row` (one row for a single head)."""
        layer, history = self._layers[row], state.history
        told = self._static_part(state, row)
        if layer.read is not None:
            token = state.hidden[0].float()
            if layer.project is not None:
                token = torch.mv(layer.project, token)
            told = torch.addmv(told, layer.read, token)
        z, drift, gate = torch.split(told, layer.widths)
        if self._recent is not None:
            seen = history[max(0, row - self._window + 1) : row + 1]
            z = torch.addmv(z, self._recent, torch.mv(seen.t(), self._even[len(seen)]))
        z = torch.addmv(self._b2, self._w2, z.relu()).relu_()
        out = torch.addmv(layer.bias, layer.out, torch.cat((z, drift))).view(-1, self._experts)
        if layer.history_scale is not None:
            out.addcmul_(history_evidence(history[row + 1 : row + 1 + self._window]), layer.history_scale)
        if layer.gate_scale is None:
            return out
        shares = gate.view(-1, self._experts).log_softmax(-1)
        return out.addcmul_(shares.clamp_(min=self._floor), layer.gate_scale)

    def _static_part(self, state: LayerState, row: int) -> Tensor:
        """What `read` adds to: the first layer's sum over what stays the same while a request decodes (layer, phase,
        retained tokens), and the constants of the drift and the routers."""
        known = self._static.get(row)
        if known is not None and known[0] is state.retained_mean and known[1] is state.visual_summary:
            return known[2]
        total = self._layers[row].read_bias.clone()
        first = total[: self._layers[row].widths[0]]
        if self._mean is not None:
            first.addmv_(self._mean, state.retained_mean.float())
        if self._summary is not None:
            first.addmv_(self._summary, state.visual_summary.float())
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
    down, routers, gate_bias = (head.pop(name, None) for name in ("down", "gate", "gate_bias"))
    asked = [weight for weight in (token, down, routers) if weight is not None]
    if token is None and asked:  # the first layer reads nothing of the token, yet its sum stands there
        asked.insert(0, asked[0].new_zeros(len(bias), asked[0].shape[1]))
    widths = [len(bias), 0 if down is None else len(down), 0 if routers is None else len(routers)]
    constants = torch.zeros(widths[1]), torch.zeros(widths[2]) if gate_bias is None else gate_bias
    return _Layer(
        project=back.T.contiguous() if back is not None and asked else None,
        read=torch.cat(asked) if asked else None,
        widths=widths,
        read_bias=torch.cat((bias if offset is None else bias + offset, *constants)),
        **head,  # type: ignore[arg-type]
    )


def _head(net: LookaheadNet, row: int) -> dict[str, Tensor | None]:
    """The published linear head: the same for all layers."""
    assert net.head is not None
    nothing = dict.fromkeys(("history_scale", "gate_scale"))
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
        "history_scale": _wide(guide.history_scale[1, row, :ahead], experts) if guide.use_history else None,
        "gate_scale": None,
    }
    if guide.use_token:
        scale = guide.drift_scale[1, row, :ahead].detach().repeat_interleave(experts).unsqueeze(-1)
        up = guide.up[row].detach()[:, :size].T * scale  # (w * E, rank)
        found["down"], offset = _through(guide.down[row].detach().T, back, centre)
        assert found["out"] is not None
        assert found["bias"] is not None
        found["out"] = torch.cat((found["out"], up), dim=1).contiguous()
        if offset is not None:
            found["bias"] = found["bias"] + up @ offset
    if guide.use_gate and ahead:
        assert gate is not None
        assert found["bias"] is not None
        found["gate"], offset = _through(gate.weights_ahead(row, ahead).flatten(0, 1), back, centre)
        found["gate_bias"] = offset
        weight = _wide(guide.gate_scale[1, row, :ahead], experts)
        found["gate_scale"] = weight
        found["bias"] = found["bias"] + weight.flatten() * math.log(experts)  # against the uniform share
    return found


def _wide(scale: Tensor, experts: int) -> Tensor:
    """(w,) -> (w, E): adding a product of equal shapes takes a third of what adding a broadcast one takes."""
    return scale.detach().unsqueeze(-1).expand(-1, experts).contiguous()


def _through(weight: Tensor | None, back: Tensor | None, centre: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(n, H) -> (n, r) for states given by their coordinates, and what their mean adds: (n,)."""
    if weight is None or back is None or centre is None:
        return None if weight is None else weight.contiguous(), None
    inner = weight @ back
    return inner.contiguous(), weight @ centre - inner @ (back.T @ centre)
