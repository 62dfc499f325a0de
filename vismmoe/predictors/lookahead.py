"""The learned predictor (VisMMoE §2): the network, its loss, and the serving object around it.

Two networks share one trunk, the published MLP (Linear, BatchNorm, ReLU, Dropout, twice):

- `published`: the trunk and one linear head, one score per expert id or one row per distance.
- `guided` (ours): for each layer l and distance d the next gate's log share, plus the drift that a low-rank map of that
  layer reads from the token state (how the logits change between layer l and layer l+d), plus the softened history of
  layer l+d, plus a bias, plus that layer's head on the trunk, which starts at zero: training starts from next gate.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vismmoe.predictors.decode_call import DecodeCall
from vismmoe.predictors.features import (
    PredictorInputs,
    feature_count,
    inputs_from_state,
    trunk_features,
)
from vismmoe.predictors.guide import Guide
from vismmoe.predictors.next_gate import NextGate
from vismmoe.predictors.options import PredictorConfig
from vismmoe.types import LayerState, ModelSpec


class LookaheadNet(nn.Module):
    """Scores of the next W layers as logits.

    `folded`: the exported form, BatchNorm and the scaling of the inputs inside the linear layers.
    """

    def __init__(self, config: PredictorConfig, spec: ModelSpec, folded: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layers, self.experts, self.hidden_size = len(spec.moe_layers), spec.num_experts, spec.hidden_size
        self.folded = folded
        features = feature_count(config, self.layers, self.experts, spec.hidden_size)
        if not folded:
            self.input_mean = nn.Buffer(torch.zeros(features))
            self.input_scale = nn.Buffer(torch.ones(features))
        first, second = config.hidden_sizes
        self.trunk = nn.Sequential(*_block(features, first, config, folded), *_block(first, second, config, folded))
        rows = config.window if config.head == "per-distance" else 1
        guided = config.network == "guided"
        self.guide = Guide(config, spec, folded) if guided else None
        self.head = None if guided else nn.Linear(second, rows * self.experts)
        narrow = config.token_rank < spec.hidden_size and (guided or config.use_token_state)
        size = (self.layers, spec.hidden_size, config.token_rank)
        self.token_basis = nn.Buffer(torch.zeros(size)) if narrow else None  # (L, H, r), for decode_call
        self.token_centre = nn.Buffer(torch.zeros(size[:2])) if narrow else None  # (L, H)

    def standardise(self, inputs: PredictorInputs) -> None:
        """Set the input scaling from training rows, so that no feature drowns the others."""
        x = trunk_features(inputs, self.config, self.layers)
        self.input_mean.copy_(x.mean(0))
        self.input_scale.copy_(1.0 / x.std(0, correction=0).clamp(min=1e-3))
        if self.guide is not None:
            self.guide.token_mean.copy_(inputs.token.mean(0))
            self.guide.token_scale.copy_(1.0 / inputs.token.std(0, correction=0).clamp(min=1e-3))
        if self.token_basis is not None and self.token_centre is not None:
            for row in range(self.layers):
                centre, basis = principal_directions(inputs.token[inputs.row == row], self.config.token_rank)
                self.token_centre[row], self.token_basis[row] = centre, basis

    def forward(self, inputs: PredictorInputs) -> Tensor:
        """(B, W, E) logits; a single head gives (B, 1, E), the same scores for every distance."""
        x = trunk_features(inputs, self.config, self.layers)
        z = self.trunk(x if self.folded else (x - self.input_mean) * self.input_scale)
        if self.guide is not None:
            return cast(Tensor, self.guide(z, inputs))
        assert self.head is not None
        return cast(Tensor, self.head(z)).view(len(z), -1, self.experts)

    def folded_weights(self) -> dict[str, Tensor]:
        """State of the exported form: float32, CPU, what is affine folded into the linear map beside it."""
        linears = [module for module in self.trunk if isinstance(module, nn.Linear)]
        norms = [module for module in self.trunk if isinstance(module, nn.BatchNorm1d)]
        (w1, b1), (w2, b2) = (_fold(linear, norm) for linear, norm in zip(linears, norms, strict=True))
        w1 = w1 * self.input_scale
        state = {
            "trunk.0.weight": w1,
            "trunk.0.bias": b1 - w1 @ self.input_mean,
            "trunk.2.weight": w2,
            "trunk.2.bias": b2,
        }
        if self.head is not None:
            state |= {"head.weight": self.head.weight, "head.bias": self.head.bias}
        if self.guide is not None:
            state |= {f"guide.{name}": value for name, value in self.guide.folded_weights().items()}
        if self.token_basis is not None and self.token_centre is not None:
            state |= {"token_basis": self.token_basis, "token_centre": self.token_centre}
        return {name: value.detach().float().cpu().clone() for name, value in state.items()}


def lookahead_loss(logits: Tensor, active: Tensor, exists: Tensor, gamma: float) -> Tensor:
    """Soft binary cross-entropy with distance decay (VisMMoE §2), a mean over what exists.

    logits: (B, W, E) or (B, 1, E); active: (B, W, E) bool, e in E_{l+d}; exists: (B, W) bool, layer l+d exists.
    One row for all distances: target g_e = max_d gamma^(d-1) 1[e in E_{l+d}]. One row per distance: row d has target
    1[e in E_{l+d}] and weight gamma^(d-1).
    """
    decay = gamma ** torch.arange(active.shape[1], device=logits.device, dtype=torch.float32)
    if logits.shape[1] == 1:
        target = (active * exists.unsqueeze(-1) * decay.view(-1, 1)).amax(1, keepdim=True)
        weight = exists.any(1, keepdim=True).float()
    else:
        target, weight = active.float(), decay * exists
    losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(-1)
    return (losses * weight).sum() / weight.sum().clamp(min=1e-9)


class LookaheadPredictor:
    """Implements types.Predictor with an exported network; `gate` is needed when the network asks for next gate."""

    kind = "lookahead"

    def __init__(self, net: LookaheadNet, spec: ModelSpec, gate: NextGate | None = None) -> None:
        if not net.folded:
            raise ValueError("only the exported form of a network can serve")
        self.window = net.config.window
        self._net = net.eval().requires_grad_(False)
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._gate = gate
        self._no_gate = torch.zeros(self.window, spec.num_experts)
        self._decode = None if self.needs_gate else DecodeCall(net, gate)

    @property
    def net(self) -> LookaheadNet:
        """The exported network, for calls on many rows at once."""
        return self._net

    @property
    def needs_gate(self) -> bool:
        """Whether `bind` must be called before `predict`."""
        return self._net.config.use_next_gate and self._gate is None

    def bind(self, gate: NextGate) -> None:
        """Hand over the routers of the checkpoint that is now loaded."""
        self._gate = gate
        self._decode = DecodeCall(self._net, gate)

    def predict(self, state: LayerState) -> Tensor:
        """(W, E) float32 in [0, 1]; rows past the last MoE layer are zero."""
        with torch.inference_mode():
            if self.needs_gate:
                raise RuntimeError("this predictor uses next gate: call bind() with the checkpoint's routers first")
            row = self._rows[state.layer]
            ahead = min(self.window, len(self._rows) - 1 - row)
            scores = self._scores(state, row, ahead).sigmoid_()
            scores = scores[:ahead] if len(scores) > 1 else scores.expand(ahead, -1)
            return scores if ahead == self.window else F.pad(scores, (0, 0, 0, self.window - ahead))

    def scores(self, inputs: PredictorInputs) -> Tensor:
        """The same for many calls at once: (B, W, E) float32 in [0, 1]; rows past the last MoE layer mean nothing."""
        with torch.no_grad():
            found = cast(Tensor, self._net(inputs)).sigmoid()
            return found.expand(-1, self.window, -1).clone()

    def _scores(self, state: LayerState, row: int, ahead: int) -> Tensor:
        gate = self._gate if self._net.config.use_next_gate else None
        if self._decode is not None and state.phase == "decode" and len(state.hidden) == 1 and ahead:
            return self._decode(state, row)
        masses = gate.masses(state.layer, state.hidden, self.window) if gate else self._no_gate
        return cast(Tensor, self._net(inputs_from_state(state, row, masses)))[0]


def principal_directions(states: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Mean (H,) of the rows and (H, rank) orthonormal directions in which they vary most."""
    centre = states.mean(0) if len(states) else torch.zeros(states.shape[1])
    spread = states - centre
    return centre, torch.linalg.eigh(spread.T @ spread).eigenvectors[:, -rank:]


def _block(width: int, out: int, config: PredictorConfig, folded: bool) -> list[nn.Module]:
    if folded:
        return [nn.Linear(width, out), nn.ReLU()]
    return [nn.Linear(width, out), nn.BatchNorm1d(out), nn.ReLU(), nn.Dropout(config.dropout)]


def _fold(linear: nn.Linear, norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    weight = linear.weight * scale.unsqueeze(1)
    bias = (linear.bias - norm.running_mean) * scale + norm.bias
    return weight.detach().float().cpu(), bias.detach().float().cpu()
