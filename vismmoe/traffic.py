"""The order of events at an MoE layer: who is fetched, foreseen, let go, and when (VisMMoE §4.3).

No tensor of the model is touched here. The pipeline lets experts run as they arrive; the simulator (vismmoe.simulate)
counts what they would have taken: both go through this very file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

from vismmoe.demand import LayerDemand
from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Transfers
from vismmoe.guesses import Guesses
from vismmoe.prefetch import Foreseen, Prefetcher
from vismmoe.read_ahead import ReadAhead
from vismmoe.session import Asker
from vismmoe.types import ExpertId, LayerState, ModelSpec, Predictor
from vismmoe.watchdog import Watchdog


class ExpertTraffic:
    """Joins cache, transfers and who guesses. To be used by one thread, the one that computes."""

    def __init__(
        self,
        spec: ModelSpec,
        first_deep: int,
        cache: ExpertCache,
        transfers: Transfers,
        watchdog: Watchdog,
        *,
        expert_bytes: int,
        predictor: Predictor | None = None,
        read_ahead: bool = False,
        below: Container[ExpertId] = (),
    ) -> None:
        """first_deep: rank of the first MoE layer whose experts are not pinned. read_ahead: of wide prefills. below:
        experts that would run where they lie, so that there is nothing to load ahead."""
        self._spec = spec
        self._cache = cache
        self._transfers = transfers
        self._guesses = Guesses(cache, transfers, watchdog, expert_bytes, below)
        self._prefetcher = Prefetcher(spec, first_deep, predictor, watchdog, cache, transfers, self._guesses)
        self._ahead = ReadAhead(spec, first_deep, self._guesses, on=read_ahead and cache.slabs > 0)
        self._cycle_slabs = spec.top_k * (len(spec.moe_layers) - first_deep)  # experts that one token may need

    def begin_request(self) -> None:
        """Guesses of an earlier request are no longer counted; what is resident stays."""
        self._guesses.begin_request()
        self._prefetcher.begin_request()

    def read_ahead(self, tokens: int) -> None:
        """A prompt of so many tokens is coming, or likely to: a wide one's first layer is read from now on."""
        self._ahead.begin_request(tokens)

    def foresee(self, asker: Asker, state: LayerState) -> Foreseen:
        """What the predictor says at this layer."""
        return self._prefetcher.foresee(asker, state)

    def begin_layer(self, lead: Asker, layer: int) -> None:
        """Before the layer's router: a step may begin, and copies that have finished are noted."""
        if layer == self._spec.moe_layers[0]:
            self._cache.begin_step()
        self._guesses.settle(lead)

    def look_ahead(self, lead: Asker, layer: int, experts: int, foresee: Callable[[], Foreseen]) -> None:
        """A pinned layer, which needs so many experts, needs no fetching; it only starts what is foreseen."""
        if self._ahead.is_wide(lead, experts):
            self._ahead.follow(lead, layer)
            self._ahead.go_on(lead)
        else:
            self._prefetcher.start(lead, foresee())

    def arrivals(
        self,
        layer: int,
        needed: Mapping[ExpertId, Sequence[Asker]],
        lasting: Collection[ExpertId],
        foresee: Callable[[], Foreseen],
        *,
        lead: Asker,
        requests: int = 1,
        run_below: Callable[[ExpertId], bool] = lambda _: False,
    ) -> Iterator[Sequence[tuple[ExpertId, int | None]]]:
        """(expert, slot) of every expert that a deeper layer needs, once each, its slab filled; run them before asking
        for more. In decode those that are there come together, in a prefill one by one.

        needed, lasting, run_below: as LayerDemand wants them, which also says what no slot means. requests: how many
        are at this layer together.
        """
        on_the_way = LayerDemand(needed, lasting, self._cache, self._transfers, self._guesses, run_below)
        self._prefetcher.learn(lead, layer, needed)
        wide = self._ahead.is_wide(lead, len(needed))
        foreseen: Foreseen = {}
        if wide:
            self._ahead.follow(lead, layer)
            self._read_on(on_the_way, lead)
        else:
            foreseen = foresee()  # while the first reads go on
            self._prefetcher.start(lead, foreseen)
        for group in on_the_way.arrivals(together=lead.phase == "decode"):
            yield group
            if wide:
                on_the_way.let_pass([expert for expert, _ in group])
                self._read_on(on_the_way, lead)
        self._cache.expire_layer(layer)
        if lead.phase == "prefill" or self._cache.slabs < self._cycle_slabs * requests:
            self._cache.begin_step()  # slabs do not hold a whole step: what earlier layers loaded may go
        if wide:
            self._ahead.go_on(lead)
        else:
            self._prefetcher.start(lead, foreseen)  # into the slabs that this layer no longer needs

    def _read_on(self, on_the_way: LayerDemand, lead: Asker) -> None:
        """Only what this layer leaves is for the next one."""
        if on_the_way.served:
            self._ahead.go_on(lead)
