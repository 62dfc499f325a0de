"""Recording mode: what the routing log keeps of each forward through each MoE layer."""

from __future__ import annotations

import torch
from torch import Tensor

from vismmoe.predictors.next_gate import NextGate
from vismmoe.session import Session
from vismmoe.types import LayerState, ModelSpec, RoutingRecord


class Recorder:
    """A pipeline's watcher: called after every router of one request."""

    def __init__(self, spec: ModelSpec, next_gate: NextGate, request: int) -> None:
        """next_gate: its window is how many MoE layers ahead the masses are noted for."""
        self.records: list[RoutingRecord] = []
        self._num_experts = spec.num_experts
        self._next_gate = next_gate
        self._request = request

    def __call__(self, session: Session, state: LayerState, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        chosen = top_k_index.reshape(-1).cpu()
        mass = torch.zeros(self._num_experts).index_add_(0, chosen, top_k_weights.reshape(-1).float().cpu())
        self.records.append(
            RoutingRecord(
                request=self._request,
                step=session.step,
                phase=state.phase,
                layer=state.layer,
                counts=torch.bincount(chosen, minlength=self._num_experts).to(torch.int32),
                gate_mass=mass,
                retained_mean=state.retained_mean.cpu(),
                token=state.hidden[-1].float().cpu(),
                own_gate=self._next_gate.here(state.layer, state.hidden).cpu(),
                next_gate=self._next_gate.masses(state.layer, state.hidden).cpu(),
            )
        )
