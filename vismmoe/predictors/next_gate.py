"""Next gate: ask the routers of the layers ahead what they would do with the state of this layer.

Nothing is learned. The input of the MoE block at layer l is RMS-normalised and scaled by that layer's norm weight;
dividing by this weight and multiplying by the later layer's gives what the later router would see if the residual
stream did not change in between.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vismmoe.types import LayerState, ModelSpec

_TIE_BREAK = 1e-6  # many tokens: experts that no token chose are ranked by their soft mass


def gate_mass(logits: Tensor, top_k: int) -> Tensor:
    """Gate mass of each expert, summed over tokens.

    logits: (..., T, E) router outputs. One token: its softmax as it stands, which ranks all experts. Many tokens: the
    softmax mass within each token's top k (what the layer would really run), soft mass only to break ties.
    Returns (..., E) float32.
    """
    shares = logits.float().softmax(-1)
    if shares.shape[-2] == 1:
        return shares.squeeze(-2)
    chosen = shares.topk(top_k, dim=-1)
    hard = torch.zeros_like(shares).scatter_(-1, chosen.indices, chosen.values)
    return hard.sum(-2) + _TIE_BREAK * shares.sum(-2)


class NextGate:
    """Implements types.Predictor with the routers of the checkpoint.

    routers: decoder layer -> (E, H) gate weight; norms: decoder layer -> (H,) weight of the norm before that MoE
    block (None: no correction). Keeps one float32 copy of all routers, L_moe * E * H * 4 bytes.
    """

    kind = "next-gate"

    def __init__(
        self,
        spec: ModelSpec,
        routers: Mapping[int, Tensor],
        norms: Mapping[int, Tensor] | None = None,
        window: int = 5,
    ) -> None:
        self.window = window
        self._top_k = spec.top_k
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        ones = torch.ones(spec.hidden_size)
        scales = torch.stack([ones if norms is None else norms[layer].detach().float() for layer in spec.moe_layers])
        weights = torch.stack([routers[layer].detach().float() for layer in spec.moe_layers])
        self._routers = weights * scales.unsqueeze(1)  # (L, E, H): the norm's weight is folded into the router
        self._unscale = torch.where(scales == 0, scales, 1.0 / scales)  # a dead channel carries nothing to any router

    def masses(self, layer: int, hidden: Tensor, window: int | None = None) -> Tensor:
        """Gate mass of the next `window` MoE layers for the MoE input of `layer`.

        hidden: (T, H). Returns (W, E) float32, row d-1 for the d-th next MoE layer, zeros past the last layer.
        """
        wanted = self.window if window is None else window
        first = self._rows[layer] + 1
        routers = self._routers[first : first + wanted]  # (w, E, H)
        out = torch.zeros(wanted, self._routers.shape[1])
        if len(routers):
            out[: len(routers)] = self._score(layer, hidden, routers)
        return out

    def here(self, layer: int, hidden: Tensor) -> Tensor:
        """Distance 0, the control: the layer's own router on its own input, (E,) float32."""
        row = self._rows[layer]
        return self._score(layer, hidden, self._routers[row : row + 1])[0]

    def predict(self, state: LayerState) -> Tensor:
        return self.masses(state.layer, state.hidden)

    def _score(self, layer: int, hidden: Tensor, routers: Tensor) -> Tensor:
        flat = hidden.float() * self._unscale[self._rows[layer]]
        logits = flat @ routers.flatten(0, 1).T  # (T, w * E)
        return gate_mass(logits.view(len(flat), *routers.shape[:2]).transpose(0, 1), self._top_k)
