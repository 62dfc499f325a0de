"""Routing that was logged, put in place of what a model's own routers say: locality is then that of a real model.

Weights that nobody trained route at random, and random routing has no locality to measure a cache with. A replay holds
the prefill of one logged request and the decoded tokens of this and the following ones (say, a conversation about one
picture), for the first layers of the logged model, and what predictors said at each of these places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vismmoe.errors import CorpusError
from vismmoe.simulate.foresight import Foresight
from vismmoe.simulate.rows import Row, requests_of
from vismmoe.trace import TraceSet
from vismmoe.types import LayerState

_SCORES = "scores."


@dataclass(frozen=True)
class Replay:
    """S forwards, a prefill first, through N MoE layers of E experts, k a token."""

    prefill: Tensor  # (N, T, k) int64 choices of each token of the prefill
    experts: Tensor  # (S - 1, N, k) int64 choices of each decoded token
    weights: Tensor  # (S - 1, N, k) float32 their gate weights
    scores: Mapping[str, Tensor]  # predictor's name -> (S, N, W, E) float32

    @property
    def steps(self) -> int:
        return len(self.experts) + 1

    def visits(self) -> list[list[tuple[int, int]]]:
        """(layer's rank, expert) that each visit of a layer needs, in the order in which they run."""
        prefill = [
            [(row, expert) for expert in chosen.unique().tolist()]  # ascending
            for row, chosen in enumerate(self.prefill)
        ]
        decode = [
            [(row, expert) for expert in sorted(chosen.tolist())]
            for step in self.experts
            for row, chosen in enumerate(step)
        ]
        return prefill + decode

    def save(self, path: Path) -> None:
        tensors = {"prefill": self.prefill, "experts": self.experts, "weights": self.weights}
        tensors |= {_SCORES + name: scores for name, scores in self.scores.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Replay:
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        scores = {name.removeprefix(_SCORES): held.pop(name) for name in list(held) if name.startswith(_SCORES)}
        return cls(**held, scores=scores)


def replay_of(
    traces: TraceSet,
    layers: int,
    steps: int,
    foresights: Mapping[str, Foresight],
    prefill: Tensor | None = None,
) -> Replay:
    """The first `layers` MoE layers and `steps` forwards of the logs; foresights: what is asked at each place.

    prefill: (N or more, T, k) choices of the first request's prefill. Logs only count them; without it the counts are
    dealt out over the tokens. CorpusError when the logs have fewer layers or fewer decoded tokens.
    """
    rank = {layer: row for row, layer in enumerate(traces.header.spec.moe_layers[:layers])}
    if len(rank) < layers:
        raise CorpusError(f"The logs are of a model with {len(rank)} MoE layers; {layers} are to be replayed.")
    kept: list[tuple[Row, Mapping[str, Tensor]]] = []
    for number, rows in enumerate(requests_of(traces)):
        told = {name: foresight.scores(traces, rows) for name, foresight in foresights.items()}
        for index, row in enumerate(rows):
            if row.layer in rank and (row.step or not number):
                kept.append((row, {name: scores[index] for name, scores in told.items()}))
        if len(kept) >= steps * layers:
            break
    if len(kept) < steps * layers:
        raise CorpusError(f"The logs hold {len(kept) // layers - 1} decoded tokens; {steps - 1} are to be replayed.")
    kept = kept[: steps * layers]
    if prefill is None:
        top_k = traces.header.spec.top_k
        counts = [traces.counts[row.number].long() for row, _ in kept[:layers]]
        prefill = torch.stack([spread(each, int(each.sum()) // top_k, top_k) for each in counts])
    return Replay(
        prefill=prefill[:layers],
        experts=_choices([row for row, _ in kept[layers:]], layers),
        weights=_shares(traces, [row for row, _ in kept[layers:]], layers),
        scores={
            name: torch.stack(
                [_within(told[name], place % layers, layers) for place, (_, told) in enumerate(kept)]
            ).view(steps, layers, -1, traces.header.spec.num_experts)
            for name in foresights
        },
    )


def _choices(rows: Sequence[Row], layers: int) -> Tensor:
    return torch.tensor([[expert for expert, _ in row.demand] for row in rows]).view(-1, layers, len(rows[0].demand))


def _shares(traces: TraceSet, rows: Sequence[Row], layers: int) -> Tensor:
    found = torch.stack([traces.gate_mass[row.number, [expert for expert, _ in row.demand]] for row in rows])
    return (found / found.sum(-1, keepdim=True)).float().view(-1, layers, len(rows[0].demand))


def _within(scores: Tensor, row: int, layers: int) -> Tensor:
    """(W, E) with the layers taken out that the replayed model does not have."""
    scores = scores.clone()
    scores[max(0, layers - 1 - row) :] = 0
    return scores


def spread(counts: Tensor, tokens: int, top_k: int) -> Tensor:
    """(tokens, k) choices in which expert e is chosen counts[e] times and no token chooses an expert twice.

    counts: (E,). When they were logged on another number of tokens they are scaled first; none that was chosen is lost
    unless the tokens have too few choices.
    """
    counts = _scaled(counts, tokens, top_k)
    listed = torch.repeat_interleave(torch.arange(len(counts)), counts)  # an expert's run is `tokens` long at the most
    return listed.view(top_k, tokens).T.contiguous()


def respread(chosen: Tensor, tokens: int, top_k: int, experts: int) -> Tensor:
    """The prefill's choices for (tokens, top_k) of them: as they are where that fits, else dealt out anew."""
    if chosen.shape == (tokens, top_k):
        return chosen
    return spread(torch.bincount(chosen.flatten(), minlength=experts), tokens, top_k)


def _scaled(counts: Tensor, tokens: int, top_k: int) -> Tensor:
    total = tokens * top_k
    if int(counts.sum()) == total:
        return counts
    wanted = counts.double() * total / int(counts.sum())
    scaled = wanted.floor().clamp(min=0, max=tokens).long()
    scaled[(counts > 0) & (scaled == 0)] = 1
    while (missing := total - int(scaled.sum())) != 0:
        room = scaled < tokens if missing > 0 else scaled > (1 if int((scaled > 1).sum()) else 0)
        gap = ((wanted - scaled) * (1 if missing > 0 else -1)).masked_fill(~room, -torch.inf)
        best = gap.topk(min(abs(missing), int(room.sum()))).indices
        scaled[best] += 1 if missing > 0 else -1
    return scaled


class ReplayedPredictor:
    """Says what was logged, at the price of asking `priced`: a predictor of the model's own size, whose opinion is not
    used, since its routers were never trained."""

    def __init__(self, kind: str, scores: Tensor, moe_layers: Sequence[int], priced: object = None) -> None:
        """scores: (S, N, W, E)."""
        self.kind = kind
        self.window = scores.shape[2]
        self.step = 0  # set by whoever replays
        self.priced = priced
        self._scores = scores
        self._rank = {layer: row for row, layer in enumerate(moe_layers)}

    def predict(self, state: LayerState) -> Tensor:
        """(W, E)."""
        if self.priced is not None:
            self.priced.predict(state)  # type: ignore[attr-defined]
        return self._scores[min(self.step, len(self._scores) - 1), self._rank[state.layer]]
