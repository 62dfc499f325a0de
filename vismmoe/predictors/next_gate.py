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
        found = gate_mass(self.logits(layer, hidden, wanted), self._top_k)
        return torch.nn.functional.pad(found, (0, 0, 0, wanted - len(found)))

    def logits(self, layer: int, hidden: Tensor, window: int) -> Tensor:
        """What the routers of the next layers say: (w, T, E) float32, w at most `window`, less near the last layer."""
        row = self._rows[layer]
        return self._ask(row, hidden, slice(row + 1, row + 1 + window))

    def here(self, layer: int, hidden: Tensor) -> Tensor:
        """Distance 0, the control: the layer's own router on its own input, (E,) float32."""
        row = self._rows[layer]
        return gate_mass(self._ask(row, hidden, slice(row, row + 1)), self._top_k)[0]

    def weights_ahead(self, row: int, ahead: int) -> Tensor:
        """(ahead, E, H) float32: the routers of the layers after MoE layer `row`, as maps of that layer's MoE input."""
        return self._routers[row + 1 : row + 1 + ahead] * self._unscale[row]

    def predict(self, state: LayerState) -> Tensor:
        return self.masses(state.layer, state.hidden)

    def _ask(self, row: int, hidden: Tensor, which: slice) -> Tensor:
        flat = hidden.float() * self._unscale[row]
        routers = self._routers[which]  # (w, E, H)
        logits = flat @ routers.flatten(0, 1).T  # (T, w * E)
        return logits.view(len(flat), *routers.shape[:2]).transpose(0, 1)
