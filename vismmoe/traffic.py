"""The order of events at an MoE layer: who is fetched, foreseen, let go, and when (VisMMoE §4.3).

No tensor of the model is touched here. The pipeline lets experts run as they arrive; the simulator (vismmoe.simulate)
counts what they would have taken: both go through this very file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from vismmoe.demand import LayerDemand
from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.transfers import Transfers
from vismmoe.prefetch import Foreseen, Prefetcher
from vismmoe.session import Asker
from vismmoe.types import ExpertId


class ExpertTraffic:
    """Joins cache, transfers and prefetcher. To be used by one thread, the one that computes."""

    def __init__(
        self,
        cache: ExpertCache,
        transfers: Transfers,
        prefetcher: Prefetcher,
        *,
        first_layer: int,
        cycle_slabs: int,
    ) -> None:
        """first_layer: the decoder layer that a step begins with; cycle_slabs: experts that one token of one request
        may need in the deeper layers, at the most."""
        self._cache = cache
        self._transfers = transfers
        self._prefetcher = prefetcher
        self._first_layer = first_layer
        self._cycle_slabs = cycle_slabs

    def begin_layer(self, lead: Asker, layer: int) -> None:
        """Before the layer's router: a step may begin, and copies that have finished are noted."""
        if layer == self._first_layer:
            self._cache.begin_step()
        self._prefetcher.settle(lead)

    def look_ahead(self, lead: Asker, foreseen: Foreseen) -> None:
        """A pinned layer needs no fetching; it only starts what is foreseen."""
        self._prefetcher.start(lead, foreseen)

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
    ) -> Iterator[tuple[ExpertId, int | None]]:
        """(expert, slot) of every expert that a deeper layer needs, once each, its slab filled; run it before asking
        for the next one. needed, lasting, run_below: as LayerDemand wants them, which also says what no slot means.
        requests: how many are at this layer together.
        """
        on_the_way = LayerDemand(needed, lasting, self._cache, self._transfers, self._prefetcher, run_below)
        foreseen = foresee()  # while the first reads go on
        self._prefetcher.start(lead, foreseen)
        yield from on_the_way.arrivals()
        self._cache.expire_layer(layer)
        if lead.phase == "prefill" or self._cache.slabs < self._cycle_slabs * requests:
            self._cache.begin_step()  # slabs do not hold a whole step: what earlier layers loaded may go
        self._prefetcher.start(lead, foreseen)  # into the slabs that this layer no longer needs
