"""What each predictor would have said at every row of a routing log: the runtime's own predictors, fed from the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Protocol

import torch
from torch import Tensor

from vismmoe.errors import UsageError
from vismmoe.predictors import Chance, Frequency, LookaheadPredictor, Previous
from vismmoe.predictors.features import PredictorInputs, inputs_from_state
from vismmoe.simulate.rows import Row, layer_states
from vismmoe.trace import TraceSet
from vismmoe.types import Predictor

RULES = ("chance", "frequency", "previous", "next-gate")
WINDOW = 5  # W, layers ahead that rules foresee, as published


class Foresight(Protocol):
    """Scores for a whole request at once."""

    @property
    def kind(self) -> str: ...

    @property
    def window(self) -> int: ...

    def scores(self, traces: TraceSet, rows: list[Row]) -> Tensor:
        """(len(rows), W, E) float32, row d-1 for the d-th next MoE layer, zeros past the last layer."""
        ...


class RuleForesight:
    """A predictor that needs no more of the hidden states than the log keeps."""

    def __init__(self, predictor: Predictor) -> None:
        self.kind, self.window = predictor.kind, predictor.window
        self._predictor = predictor

    def scores(self, traces: TraceSet, rows: list[Row]) -> Tensor:
        return torch.stack([self._predictor.predict(state) for state in layer_states(traces, rows)])


class LoggedGate:
    """Next gate, as the log has it."""

    kind = "next-gate"

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window

    def scores(self, traces: TraceSet, rows: list[Row]) -> Tensor:
        return traces.next_gate[[row.number for row in rows], : self.window]


class OtherRequestsFrequency:
    """Static frequency, counted on all requests but the one that is foreseen."""

    kind = "frequency"

    def __init__(self, traces: TraceSet, window: int = WINDOW) -> None:
        self.window = window
        self._total = _uses(traces, torch.arange(len(traces)))

    def scores(self, traces: TraceSet, rows: list[Row]) -> Tensor:
        own = _uses(traces, torch.tensor([row.number for row in rows]))
        rule = Frequency(traces.header.spec, self._total - own, self.window)
        return RuleForesight(rule).scores(traces, rows)


class LearnedForesight:
    """The predictor of an artifact, all rows of a request in one call."""

    def __init__(self, predictor: LookaheadPredictor) -> None:
        self.kind, self.window = predictor.kind, predictor.window
        self._predictor = predictor

    def scores(self, traces: TraceSet, rows: list[Row]) -> Tensor:
        spec = traces.header.spec
        place = {layer: index for index, layer in enumerate(spec.moe_layers)}
        inputs = []
        for row, state in zip(rows, layer_states(traces, rows), strict=True):
            gate = traces.next_gate[row.number, : self.window]
            inputs.append(inputs_from_state(state, place[row.layer], gate))
        found = self._predictor.scores(joined(inputs))
        for row, score in zip(rows, found, strict=True):
            score[len(spec.moe_layers) - 1 - place[row.layer] :] = 0
        return found


def rule_foresight(rule: str, traces: TraceSet, window: int = WINDOW) -> Foresight:
    """One of RULES over these logs. UsageError for another name, or a window that the logs do not reach."""
    if rule == "next-gate":
        if window > traces.header.window:
            raise UsageError(f"The routing logs look {traces.header.window} layers ahead, not {window}: collect again.")
        return LoggedGate(window)
    if rule == "frequency":
        return OtherRequestsFrequency(traces, window)
    if rule == "previous":
        return RuleForesight(Previous(traces.header.spec, window))
    if rule == "chance":
        return RuleForesight(Chance(traces.header.spec, window))
    raise UsageError(f"There is no rule {rule!r} of foreseeing experts; there are {', '.join(RULES)}.")


def joined(inputs: Sequence[PredictorInputs]) -> PredictorInputs:
    """Several calls as one batch."""
    names = [field.name for field in fields(PredictorInputs)]
    return PredictorInputs(**{name: torch.cat([getattr(one, name) for one in inputs]) for name in names})


def _uses(traces: TraceSet, rows: Tensor) -> Tensor:
    """(2, L, E) float32: how often each expert ran in these rows, prefill then decode."""
    spec = traces.header.spec
    place = torch.full((max(spec.moe_layers) + 1,), -1)
    place[list(spec.moe_layers)] = torch.arange(len(spec.moe_layers))
    table = torch.zeros(2 * len(spec.moe_layers), spec.num_experts)
    key = traces.decode[rows].long() * len(spec.moe_layers) + place[traces.layer[rows]]
    table.index_add_(0, key, (traces.counts[rows] > 0).float())
    return table.view(2, -1, spec.num_experts)
