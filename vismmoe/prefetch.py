"""Loading ahead what a predictor foresees (VisMMoE §4.2, §4.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Transfers
from vismmoe.guesses import Guesses
from vismmoe.session import Asker
from vismmoe.types import ExpertId, LayerState, ModelSpec, Predictor
from vismmoe.watchdog import Watchdog

Foreseen = Mapping[ExpertId, float]  # expert -> priority, most urgent first


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

    def foresee(self, session: Asker, state: LayerState) -> Foreseen:
        """Experts of the deeper layers ahead by predictor score: B of them in decode.

        In prefill demand is broad and the list orders rather than selects: as many as one layer has.
        """
        if self._predictor is None:
            return {}
        started = self._transfers.now()
        row = self._rows[state.layer]
        first = max(row + 1, self._first_deep)
        layers = self._spec.moe_layers[first : row + 1 + self._predictor.window]
        foreseen: dict[ExpertId, float] = {}
        if layers:
            scores = self._predictor.predict(state)[first - row - 1 :][: len(layers)]
            limit = self._watchdog.allowed if state.phase == "decode" else self._spec.num_experts
            best = scores.flatten().topk(min(limit, scores.numel()))
            for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                if value == -math.inf:
                    break  # the predictor's way to say "certainly not"
                foreseen[ExpertId(layers[place // self._spec.num_experts], place % self._spec.num_experts)] = value
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
        self._guesses.start(session, foreseen.items(), passing=session.phase == "prefill")
