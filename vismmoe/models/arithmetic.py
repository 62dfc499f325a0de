"""The arithmetic of routed experts: one function for resident and streamed experts, so that their bits agree.

Contributions are kept apart until all experts of the layer have run and are then added per token in ascending expert
order, the order of transformers' own eager loop. Hence the order in which experts arrive changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vismmoe.models.products import product


@dataclass(frozen=True)
class Demand:
    """Which experts one forward of one layer needs, told on the host. T tokens choose k experts each."""

    experts: tuple[int, ...]  # distinct, ascending
    counts: tuple[int, ...]  # tokens of each of `experts`
    pairs: tuple[Tensor, ...]  # per expert: (count,) int64 flat indices into the (T, k) choices, on the device
    ascending: Tensor  # (T, k) int64 flat indices, each token's choices by ascending expert, on the device


def read_demand(top_k_index: Tensor) -> Demand:
    """Bring the router's choice (T, k) to the host: the one synchronisation of a layer."""
    device = top_k_index.device
    chosen = top_k_index.detach().cpu()
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    listed = counts.tolist()
    k = chosen.shape[-1]
    ascending = torch.argsort(chosen, dim=-1) + torch.arange(0, flat.numel(), k).unsqueeze(-1)
    return Demand(tuple(experts.tolist()), tuple(listed), torch.split(order.to(device), listed), ascending.to(device))


class LayerSum:
    """Collects what each expert contributes to one layer's output (T, H)."""

    def __init__(self, module: nn.Module, hidden: Tensor, top_k_weights: Tensor, demand: Demand) -> None:
        self._module = module
        self._hidden = hidden
        self._weights = top_k_weights.reshape(-1, 1)  # (T * k, 1)
        self._demand = demand
        self._k = top_k_weights.shape[-1]
        self._parts = hidden.new_empty(len(self._weights), hidden.shape[-1])  # (T * k, H)
        self._index = {expert: place for place, expert in enumerate(demand.experts)}

    def run(self, expert: int, weights: Mapping[str, Tensor]) -> None:
        """Let `expert` work on its tokens. weights: part name -> view in in-memory orientation, any float type."""
        pairs = self._demand.pairs[self._index[expert]]
        rows = self._hidden if len(self._hidden) == 1 else self._hidden[pairs // self._k]
        rows = rows.to(next(iter(weights.values())).device)  # an expert may run where it lies, in host memory
        held = {name: weight.to(rows.dtype) for name, weight in weights.items()}
        part = self._expert(rows, held).to(self._parts.device) * self._weights[pairs]
        self._parts[pairs] = part.to(self._parts.dtype)  # some routers weigh in float32

    def _expert(self, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """(count, H) of one expert, as the flags of the experts class say."""
        module: Any = self._module
        if module.has_gate:
            inner = module._apply_gate(self._affine(rows, weights, "gate_up_proj"))
        else:
            inner = module.act_fn(self._affine(rows, weights, "up_proj"))
        out = self._affine(inner, weights, "down_proj")
        return cast(Tensor, module.post_expert_norm(out)) if module.has_post_expert_norm else out

    def _affine(self, rows: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
        weight = weights[name]
        if self._module.is_transposed:
            weight = weight.transpose(-1, -2)
        return product(rows, weight, weights.get(f"{name}_bias"))

    def total(self) -> Tensor:
        """(T, H): the layer's output, once every needed expert has run."""
        out = torch.zeros_like(self._hidden)
        for column in self._demand.ascending.unbind(-1):
            out += self._parts[column]
        return out
