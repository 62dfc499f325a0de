"""One request of the routing logs, as the simulator walks through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.predictors.features import advance_history
from vismmoe.trace import TraceSet
from vismmoe.types import LayerState, Phase


@dataclass(frozen=True)
class Row:
    """One MoE layer of one forward."""

    number: int  # row of the logs
    step: int  # 0 is the prefill
    layer: int  # decoder layer
    tokens: float  # of this forward
    demand: tuple[tuple[int, float], ...]  # (expert, its tokens), experts ascending

    @property
    def phase(self) -> Phase:
        return "decode" if self.step else "prefill"


def requests_of(traces: TraceSet, limit: int | None = None) -> Iterator[list[Row]]:
    """The rows of each request, forward by forward and layer by layer; `limit`: of so many requests."""
    count = len(traces.requests) if limit is None else min(limit, len(traces.requests))
    order = torch.argsort(traces.request * (int(traces.step.max()) + 1) + traces.step, stable=True)
    splits = torch.bincount(traces.request, minlength=len(traces.requests))[:count].tolist()
    tokens = (traces.counts.sum(-1) / traces.header.spec.top_k).tolist()
    for numbers in torch.split(order[: sum(splits)], splits):
        yield [_row(traces, number, tokens[number]) for number in numbers.tolist()]


def layer_states(traces: TraceSet, rows: list[Row]) -> Iterator[LayerState]:
    """What a predictor saw at each row of one request.

    Logs keep the last token of a forward only, which is all tokens in decode.
    """
    spec = traces.header.spec
    history = torch.zeros(len(spec.moe_layers), spec.num_experts)
    place = {layer: index for index, layer in enumerate(spec.moe_layers)}
    for row in rows:
        index = place[row.layer]
        history[index] = advance_history(history[index], traces.counts[row.number], spec.top_k)
        yield LayerState(
            row.layer,
            row.phase,
            traces.token[row.number].float().unsqueeze(0),
            traces.retained_mean[traces.retained_row[row.number]].float(),
            traces.requests[int(traces.request[row.number])].visual_summary.float(),
            history.clone(),
        )


def _row(traces: TraceSet, number: int, tokens: float) -> Row:
    counts: Tensor = traces.counts[number]
    experts = counts.nonzero().flatten()
    demand = tuple(zip(experts.tolist(), counts[experts].float().tolist(), strict=True))
    return Row(number, int(traces.step[number]), int(traces.layer[number]), tokens, demand)
