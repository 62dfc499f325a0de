"""Loading ahead what a predictor foresees (VisMMoE §4.2, §4.3).

The published list has a fixed length. Here it orders and protects; what is loaded is only what is likely enough to be
needed (vismmoe.confidence): a copy in vain delays the next one that is wanted and costs somebody a slab.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from torch import Tensor

from vismmoe.confidence import Confidence, Place
from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Transfers
from vismmoe.guesses import Guesses
from vismmoe.session import Asker
from vismmoe.types import ExpertId, LayerState, ModelSpec, Predictor
from vismmoe.watchdog import Watchdog

Foreseen = Mapping[ExpertId, float]  # expert -> chance in decode, score in prefill; most urgent first
_RANKS = 2  # ranks that are looked at in each layer ahead, in multiples of top k


class Prefetcher:
    """Asks the predictor, and says what is to be loaded ahead for it."""

    def __init__(
        self,
        spec: ModelSpec,
        first_deep: int,
        predictor: Predictor | None,
        watchdog: Watchdog,
        cache: ExpertCache,
        transfers: Transfers,
        guesses: Guesses,
    ) -> None:
        """first_deep: rank of the first MoE layer whose experts are not pinned. Without a predictor, or without slabs,
        nothing is ever foreseen."""
        self._spec = spec
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._first_deep = first_deep
        self._predictor = predictor if cache.slabs else None
        self._watchdog = watchdog
        self._cache = cache
        self._transfers = transfers
        self._guesses = guesses
        self._confidence = Confidence(spec.top_k)

    def begin_request(self) -> None:
        """What an earlier request foresaw is forgotten; how often such forecasts come true is not."""
        self._confidence.begin_request()

    def learn(self, asker: Asker, layer: int, needed: Container[ExpertId]) -> None:
        """The layer's router has spoken: compare with what was foreseen."""
        if self._predictor is not None and asker.phase == "decode":
            self._confidence.learn(layer, needed)

    def foresee(self, session: Asker, state: LayerState) -> Foreseen:
        """Experts of the deeper layers ahead, most urgent first: the likeliest B of them in decode.

        In a prefill demand is broad and the list orders rather than selects: as many as one layer has, by score.
        """
        if self._predictor is None:
            return {}
        started = self._transfers.now()
        row = self._rows[state.layer]
        first = max(row + 1, self._first_deep)
        layers = self._spec.moe_layers[first : row + 1 + self._predictor.window]
        foreseen: Foreseen = {}
        if layers:
            scores = self._predictor.predict(state)[first - row - 1 :][: len(layers)]
            ask = self._likeliest if state.phase == "decode" else self._best
            foreseen = ask(scores, layers, first - row)
        session.clock.predictor += (self._transfers.now() - started) * 1e3
        return foreseen

    def start(self, session: Asker, foreseen: Foreseen) -> None:
        """Start copies of what is foreseen and absent, most urgent first, as far as slabs may be taken; older guesses
        that are not foreseen any more leave the queue."""
        self._guesses.drop(session, foreseen.__contains__)
        if self._predictor is None:
            return
        self._cache.prioritise(foreseen)
        self._cache.protect(foreseen)
        if session.phase == "prefill":
            self._guesses.start(session, foreseen.items(), passing=True)
            return
        bar = self._watchdog.bar
        likely = ((expert, chance) for expert, chance in foreseen.items() if chance >= bar)
        self._guesses.start(session, likely, passing=False, worth=True)

    def _best(self, scores: Tensor, layers: tuple[int, ...], nearest: int) -> Foreseen:
        """By score, over all layers together."""
        best = scores.flatten().topk(min(self._spec.num_experts, scores.numel()))
        foreseen: dict[ExpertId, float] = {}
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            if value == -math.inf:
                break  # the predictor's way to say "certainly not"
            foreseen[ExpertId(layers[place // self._spec.num_experts], place % self._spec.num_experts)] = value
        return foreseen

    def _likeliest(self, scores: Tensor, layers: tuple[int, ...], nearest: int) -> Foreseen:
        """By chance; nearest: how many layers ahead the first of `layers` is."""
        best = scores.topk(min(_RANKS * self._spec.top_k, scores.shape[-1]), dim=-1)
        found: list[tuple[float, int, ExpertId]] = []
        rows = zip(layers, best.values.tolist(), best.indices.tolist(), strict=True)
        for distance, (layer, values, experts) in enumerate(rows, start=nearest):
            named = []
            for rank, (value, expert) in enumerate(zip(values, experts, strict=True)):
                if value == -math.inf:
                    break
                known = ExpertId(layer, expert)
                place = Place(distance, rank, known in self._cache)
                named.append((known, place))
                found.append((-self._confidence.chance(place), len(found), known))
            self._confidence.foreseen(layer, named)
        found.sort()
        return {expert: -chance for chance, _, expert in found[: self._watchdog.allowed]}
