"""The arithmetic of routed experts: one function for resident and streamed experts, so that their bits agree.

Contributions are kept apart until all experts of the layer have run and are then added per token in ascending expert
order, the order of transformers' own eager loop. Hence the order in which experts arrive changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vismmoe.models.products import product

# Element by element, torch works in vectors of at most so many numbers, and by another routine on what is left at the
# end; more than so many elements it deals out among threads, each of which has an end.
_VECTOR = 64
_ONE_THREAD_S = 32768

Weights = Mapping[str, Tensor]  # part name -> view in in-memory orientation, any float type


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
    if len(chosen) == 1 and (found := _demand_of_token(chosen[0].tolist(), device)) is not None:
        return found
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    experts, counts = torch.unique_consecutive(flat[order], return_counts=True)
    listed = counts.tolist()
    k = chosen.shape[-1]
    ascending = torch.argsort(chosen, dim=-1) + torch.arange(0, flat.numel(), k).unsqueeze(-1)
    return Demand(tuple(experts.tolist()), tuple(listed), torch.split(order.to(device), listed), ascending.to(device))


def _demand_of_token(chosen: list[int], device: torch.device) -> Demand | None:
    """The same with fewer operations; None if the token chose an expert twice."""
    if len(set(chosen)) < len(chosen):
        return None
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    ascending = torch.tensor([order], device=device)
    return Demand(tuple(sorted(chosen)), (1,) * len(chosen), torch.split(ascending[0], 1), ascending)


class LayerSum:
    """Collects what each expert contributes to one layer's output (T, H).

    In decode a layer has one token, and what its experts do element by element is done for those at hand together. An
    expert's bits do not depend on its company.
    """

    def __init__(self, module: nn.Module, hidden: Tensor, top_k_weights: Tensor, demand: Demand) -> None:
        self._module = module
        self._hidden = hidden
        self._weights = top_k_weights.reshape(-1, 1)  # (T * k, 1)
        self._demand = demand
        self._k = top_k_weights.shape[-1]
        self._index = {expert: place for place, expert in enumerate(demand.experts)}
        self._one_token = len(hidden) == 1 and len(self._index) == self._k  # k distinct experts
        # (T * k, H), weighed, as the router listed them; of one token k times (1, H), unweighed, experts ascending
        self._parts = hidden.new_empty(0 if self._one_token else len(self._weights), hidden.shape[-1])
        self._outputs: list[Tensor | None] = [None] * self._k

    def run(self, experts: Mapping[int, Weights]) -> None:
        """Let experts, whose weights all lie on one device, work on their tokens."""
        if self._one_token:
            outputs = self._run(self._hidden, list(experts.values()))
            for expert, output in zip(experts, outputs, strict=True):
                self._outputs[self._index[expert]] = output
            return
        for expert, weights in experts.items():
            pairs = self._demand.pairs[self._index[expert]]
            rows = self._hidden if len(self._hidden) == 1 else self._hidden[pairs // self._k]
            part = self._run(rows, [weights])[0] * self._weights[pairs]
            self._parts[pairs] = part.to(self._parts.dtype)  # some routers weigh in float32

    def total(self) -> Tensor:
        """(T, H): the layer's output, once every needed expert has run."""
        out = torch.zeros_like(self._hidden)
        if self._one_token:
            parts = torch.cat(cast(list[Tensor], self._outputs)) * self._weights[self._demand.ascending[0]]
            for part in torch.split(parts.to(out.dtype), 1):
                out += part
            return out
        for column in self._demand.ascending.unbind(-1):
            out += self._parts[column]
        return out

    def _run(self, rows: Tensor, experts: Sequence[Weights]) -> list[Tensor]:
        """(count, H) of each expert, as the flags of the experts class say; each works on all of `rows`."""
        here = rows.device
        rows = rows.to(next(iter(experts[0].values())).device)  # experts may run where they lie, in host memory
        first = "gate_up_proj" if self._module.has_gate else "up_proj"
        inner = self._activate([self._affine(rows, weights, first) for weights in experts])
        outputs = [self._affine(part, weights, "down_proj") for part, weights in zip(inner, experts, strict=True)]
        if self._module.has_post_expert_norm:
            norm: Any = self._module.post_expert_norm
            outputs = [norm(output) for output in outputs]
        return [output.to(here) for output in outputs]

    def _activate(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        """What stands between the two products. Several (1, width) go through it as one matrix where that cannot change
        a bit: if rows are whole vectors and one thread does them all."""
        module: Any = self._module
        activate = module._apply_gate if module.has_gate else module.act_fn
        width = found[0].shape[-1] // (2 if module.has_gate else 1)
        if len(found) == 1 or width % _VECTOR or len(found) * width > _ONE_THREAD_S:
            return [activate(part) for part in found]
        return torch.split(activate(torch.cat(list(found))), 1)

    def _affine(self, rows: Tensor, weights: Weights, name: str) -> Tensor:
        weight, bias = weights[name], weights.get(f"{name}_bias")
        if self._module.is_transposed:
            weight = weight.transpose(-1, -2)
        return product(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
