"""Loading ahead what a predictor foresees (VisMMoE §4.2, §4.3)."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping

from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Ticket, Transfers
from vismmoe.session import Asker
from vismmoe.types import ExpertId, LayerState, ModelSpec, Phase, Predictor
from vismmoe.watchdog import Watchdog

Foreseen = Mapping[ExpertId, float]  # expert -> priority, most urgent first


class Prefetcher:
    """Owns the guesses: experts that were loaded ahead and not used yet."""

    def __init__(
        self,
        spec: ModelSpec,
        first_deep: int,
        predictor: Predictor | None,
        watchdog: Watchdog,
        cache: ExpertCache,
        transfers: Transfers,
        expert_bytes: int,
        below: Container[ExpertId] = (),
    ) -> None:
        """first_deep: rank of the first MoE layer whose experts are not pinned. Without a predictor, or without slabs,
        nothing is ever foreseen. below: experts that would run where they lie, so that there is nothing to load."""
        self._spec = spec
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._first_deep = first_deep
        self._predictor = predictor if cache.slabs else None
        self._watchdog = watchdog
        self._cache = cache
        self._transfers = transfers
        self._expert_bytes = expert_bytes
        self._below = below
        self._guesses: dict[ExpertId, Phase] = {}  # -> phase that it was issued in

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
        if self._predictor is None:
            return
        for expert in self._transfers.drop_stale(foreseen.__contains__):
            self._forget(session, expert)
        self._cache.prioritise(foreseen)
        self._cache.protect(foreseen)
        placed: list[tuple[ExpertId, int, float]] = []
        for expert, priority in foreseen.items():
            if expert in self._cache or expert in self._below:
                continue
            placement = self._cache.speculate(expert, priority, passing=session.phase == "prefill")
            if placement is None:
                break  # no room for this one, hence for none that is less urgent
            self.evicted(placement.evicted)
            self._guesses[expert] = session.phase
            placed.append((expert, placement.slot, priority))
        if not placed:
            return
        session.counting.prefetched += len(placed)
        if session.phase == "decode":
            self._watchdog.issued(len(placed))
        self._transfers.speculate_batch(placed)

    def settle(self, session: Asker) -> None:
        """Take note of copies that have finished."""
        for ticket in self._transfers.drain():
            if ticket.error is not None:
                self._forget(session, ticket.expert)  # demand will meet the error again, if it is ever needed
            else:
                self.landed(session, ticket)

    def landed(self, session: Asker, ticket: Ticket) -> None:
        """A copy, ahead or on demand, has filled its slab."""
        self._cache.landed(ticket.expert)
        session.counting.bytes_loaded += self._expert_bytes

    def used(self, session: Asker, expert: ExpertId) -> None:
        """The expert was needed and has a slab: was it loaded ahead?"""
        issued = self._guesses.pop(expert, None)
        if issued is not None:
            session.counters[issued].prefetched_used += 1
            if issued == "decode":
                self._watchdog.used()

    def evicted(self, expert: ExpertId | None) -> None:
        """The expert has lost its slab: if it was a guess, it was a wrong one."""
        if expert is not None:
            self._guesses.pop(expert, None)

    def begin_request(self) -> None:
        """Guesses of an earlier request are no longer counted; what is resident stays."""
        self._guesses.clear()

    def _forget(self, session: Asker, expert: ExpertId) -> None:
        """A copy was dropped before it began: it was never loaded."""
        self._cache.forget(expert)
        issued = self._guesses.pop(expert, None)
        if issued is not None:
            session.counters[issued].prefetched -= 1
            if issued == "decode":
                self._watchdog.issued(-1)
