"""From routing logs to rows: what each call of the predictor would have seen, and what then happened.

A row is one MoE layer of one forward. Nothing is copied per row: histories, targets and next gate are found through
index tables, so memory grows with the logs and not with the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vismmoe.errors import CorpusError
from vismmoe.predictors.features import PredictorInputs, advance_history, gate_evidence
from vismmoe.trace import TraceSet
from vismmoe.types import ModelSpec


@dataclass(frozen=True)
class Batch:
    """B rows: what the predictor sees, what came to pass."""

    inputs: PredictorInputs
    active: Tensor  # (B, W, E) bool, experts that layer l+d then used; false where there is no such layer
    exists: Tensor  # (B, W) bool, layer l+d exists


class RowTable(Dataset[Batch]):
    """All rows of a TraceSet that have at least one layer ahead; indexed by a tensor of row numbers."""

    def __init__(self, traces: TraceSet, window: int) -> None:
        if window > traces.header.window:
            raise CorpusError(
                f"The routing logs look {traces.header.window} layers ahead, window {window} needs more: collect again."
            )
        self.header = traces.header
        self.spec: ModelSpec = traces.header.spec
        self.window, self._traces = window, traces
        place = {layer: row for row, layer in enumerate(self.spec.moe_layers)}
        lookup = torch.full((max(place) + 1,), -1)
        lookup[list(place)] = torch.tensor(list(place.values()))
        self.row = lookup[traces.layer]
        index = _RowIndex(traces, self.row)
        ahead, behind = torch.arange(1, window + 1), -torch.arange(window)
        self.target = index.find(0, ahead)  # (R, W) row of the same forward at layer l+d, -1: none
        self._before = index.find(-1, ahead)  # (R, W) the same layer one forward earlier
        self._recent = index.find(0, behind)  # (R, W) this layer and those before it
        self._history = _histories(traces, index)
        self._summaries = torch.stack([request.visual_summary for request in traces.requests])

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, rows: Tensor) -> Batch:
        return Batch(self.inputs(rows), self.active(rows), self.target[rows] >= 0)

    def inputs(self, rows: Tensor) -> PredictorInputs:
        """What `features.inputs_from_state` gives while serving, for many rows."""
        traces = self._traces
        recent = self._recent[rows]
        found = (recent >= 0).sum(1, keepdim=True).clamp(min=1)
        return PredictorInputs(
            row=self.row[rows],
            decode=traces.decode[rows],
            token=traces.token[rows].float(),
            retained_mean=traces.retained_mean[traces.retained_row[rows]].float(),
            visual_summary=self._summaries[traces.request[rows]].float(),
            recent=_gather(self._history, recent).sum(1) / found,
            ahead=_gather(self._history, self._before[rows]),
            next_gate=traces.next_gate[rows, : self.window] * (self.target[rows] >= 0).unsqueeze(-1),
        )

    def active(self, rows: Tensor) -> Tensor:
        """(B, W, E) bool: the experts that layer l+d of the same forward used."""
        return _gather(self._traces.counts, self.target[rows]) > 0

    def drift(self, rows: Tensor) -> Tensor:
        """(B, W, E) float32: change of the log share of each expert from what next gate saw to what layer l+d's own
        router then saw, centred over experts; zeros where there is no such layer.
        """
        exists = (self.target[rows] >= 0).unsqueeze(-1)
        decode = self._traces.decode[rows]
        seen = gate_evidence(_gather(self._traces.own_gate, self.target[rows]), decode)
        change = seen - gate_evidence(self._traces.next_gate[rows, : self.window] * exists, decode)
        return (change - change.mean(-1, keepdim=True)) * exists

    def mass(self, rows: Tensor) -> Tensor:
        """(B, W, E) float32: their gate mass."""
        return _gather(self._traces.gate_mass, self.target[rows])

    def held(self, rows: Tensor) -> Tensor:
        """(B, W, E) bool: the experts that layer l+d used in the forward before; false where there was none."""
        return _gather(self._traces.counts, self._before[rows]) > 0

    def own_gate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Distance 0: (B, E) mass by the layer's own router on its own input, and (B, E) bool what then ran."""
        return self._traces.own_gate[rows], self._traces.counts[rows] > 0

    def corpora(self) -> tuple[str, ...]:
        """The corpus (folder of logs) of each request."""
        return self._traces.corpora

    def useful(self) -> Tensor:
        """(R,) bool: rows with at least one layer ahead."""
        return (self.target >= 0).any(1)

    def decode(self, rows: Tensor) -> Tensor:
        return self._traces.decode[rows]

    def items(self) -> list[str]:
        """Corpus item of each request."""
        return [request.item for request in self._traces.requests]

    def request(self) -> Tensor:
        """(R,) int64 request of each row."""
        return self._traces.request

    def expert_table(self, rows: Tensor) -> Tensor:
        """(2, L, E) float32: how often each expert ran in these rows' own layers, prefill then decode."""
        table = torch.zeros(2 * len(self.spec.moe_layers), self.spec.num_experts)
        key = self._traces.decode[rows].long() * len(self.spec.moe_layers) + self.row[rows]
        table.index_add_(0, key, (self._traces.counts[rows] > 0).float())
        return table.view(2, -1, self.spec.num_experts)


class _RowIndex:
    """Finds the row of another layer or step of the same request."""

    def __init__(self, traces: TraceSet, row: Tensor) -> None:
        self._request, self._step, self._row = traces.request, traces.step, row
        self.steps = int(traces.step.max()) + 1 if len(traces) else 0
        self.layers = len(traces.header.spec.moe_layers)
        self._table = torch.full((len(traces.requests) * self.steps * self.layers,), -1)
        self._table[self._key(traces.step, row)] = torch.arange(len(traces))

    def find(self, steps: int, layers: Tensor) -> Tensor:
        """(R, N) row number at (step + steps, MoE layer + layers[n]), -1 where there is none."""
        step = (self._step + steps).unsqueeze(1).expand(-1, len(layers))
        layer = self._row.unsqueeze(1) + layers
        inside = (step >= 0) & (step < self.steps) & (layer >= 0) & (layer < self.layers)
        request = self._request.unsqueeze(1)
        key = (request * self.steps + step.clamp(min=0)) * self.layers + layer.clamp(0, self.layers - 1)
        return torch.where(inside, self._table[key.clamp(max=len(self._table) - 1)], -1)

    def _key(self, step: Tensor, row: Tensor) -> Tensor:
        return (self._request * self.steps + step) * self.layers + row


def _histories(traces: TraceSet, index: _RowIndex) -> Tensor:
    """(R, E) float32: the decayed histogram of each row's layer just after that row's router has run."""
    before = index.find(-1, torch.tensor([0])).flatten()
    out = torch.zeros(len(traces), traces.header.spec.num_experts)
    for step in range(index.steps):
        rows = (traces.step == step).nonzero().flatten()
        out[rows] = advance_history(_gather(out, before[rows]), traces.counts[rows], traces.header.spec.top_k)
    return out


def _gather(table: Tensor, index: Tensor) -> Tensor:
    """table[index] with zeros where the index is -1. (R, E), (...) -> (..., E)."""
    return table[index.clamp(min=0)] * (index >= 0).unsqueeze(-1)
