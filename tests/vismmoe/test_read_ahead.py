"""Wide prefills are read ahead in the order of the file: nothing else is, and decode's working set stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.tickets import State, Ticket
from vismmoe.session import Asker
from vismmoe.simulate.replay import Asker as Request
from vismmoe.traffic import ExpertTraffic
from vismmoe.types import ExpertId, ModelSpec
from vismmoe.watchdog import Watchdog

EXPERTS, TOP_K, LAYERS = 16, 2, 3
SPEC = ModelSpec("none", LAYERS, tuple(range(LAYERS)), EXPERTS, TOP_K, 8, 8, "0")


class Shelf:
    """Transfers without a disk: what is asked for, in order; deliver() fills slabs, a wait delivers its own."""

    def __init__(self) -> None:
        self.order: list[tuple[ExpertId, bool]] = []  # with whether it was a guess
        self.queued: list[Ticket] = []
        self.open: dict[ExpertId, Ticket] = {}

    def now(self) -> float:
        return 0.0

    def demand_batch(self, placed: Sequence[tuple[ExpertId, int]]) -> list[Ticket]:
        return [self._add(Ticket(self, expert, slot, False, 0.0)) for expert, slot in placed]

    def speculate_batch(self, placed: Sequence[tuple[ExpertId, int, float]]) -> list[Ticket]:
        return [self._add(Ticket(self, expert, slot, True, priority)) for expert, slot, priority in placed]

    def _add(self, ticket: Ticket) -> Ticket:
        self.order.append((ticket.expert, ticket.speculative))
        self.queued.append(ticket)
        self.open[ticket.expert] = ticket
        return ticket

    def ticket(self, expert: ExpertId) -> Ticket | None:
        return self.open.get(expert)

    def deliver(self, count: int) -> None:
        for ticket in self.queued[:count]:
            ticket.state, ticket.filled = State.DONE, True
        del self.queued[:count]

    def drain(self) -> list[Ticket]:
        done = [ticket for ticket in self.open.values() if ticket.done and ticket.speculative]
        for ticket in done:
            del self.open[ticket.expert]
        return done

    def drop_stale(self, keep: Callable[[ExpertId], bool]) -> list[ExpertId]:
        dropped = [ticket.expert for ticket in self.queued if ticket.speculative and not keep(ticket.expert)]
        self.queued = [ticket for ticket in self.queued if ticket.expert not in dropped]
        for expert in dropped:
            del self.open[expert]
        return dropped

    def promote(self, ticket: Ticket) -> None:
        ticket.speculative = False

    def finish(self, ticket: Ticket) -> None:
        if not ticket.done:
            self.queued.remove(ticket)
            ticket.state, ticket.filled = State.DONE, True
        self.open.pop(ticket.expert, None)


def traffic_of(slabs: int, shelf: Shelf, read_ahead: bool = True) -> ExpertTraffic:
    cache = ExpertCache(slabs, reserve=TOP_K)
    return ExpertTraffic(
        SPEC, 0, cache, shelf, Watchdog(20), expert_bytes=1, read_ahead=read_ahead
    )  # fmt: skip


def run_layer(traffic: ExpertTraffic, asker: Asker, layer: int, experts: Sequence[int], lasting: int = 0) -> list[int]:
    """The experts in the order in which they ran."""
    traffic.begin_layer(asker, layer)
    needed: dict[ExpertId, list[Any]] = {ExpertId(layer, expert): [asker] for expert in experts}
    kept = [ExpertId(layer, expert) for expert in experts[:lasting]]
    groups = traffic.arrivals(layer, needed, kept, dict, lead=asker)
    return [expert.expert for group in groups for expert, _ in group]


def guesses(shelf: Shelf, layer: int) -> list[int]:
    return [expert.expert for expert, guess in shelf.order if guess and expert.layer == layer]


def test_a_long_prompt_lets_its_first_layer_be_read_before_its_first_router_speaks() -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(EXPERTS + TOP_K, shelf)
    traffic.read_ahead(tokens=100)
    assert guesses(shelf, 0) == list(range(EXPERTS)), "in the order of the file"
    shelf.deliver(EXPERTS)
    traffic.begin_request()
    assert run_layer(traffic, asker, 0, list(range(EXPERTS - 1))) == list(range(EXPERTS - 1))
    told = asker.counters["prefill"]
    assert (told.accesses, told.hits, told.demand_loads) == (EXPERTS - 1, EXPERTS - 1, 0)
    assert told.bytes_loaded == EXPERTS
    assert told.prefetched_used == EXPERTS - 1


def test_a_short_prompt_drops_what_was_begun_for_a_long_one() -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(EXPERTS + TOP_K, shelf)
    traffic.read_ahead(tokens=100)
    shelf.deliver(3)
    traffic.begin_request()
    traffic.read_ahead(tokens=1)
    assert shelf.queued == []
    run_layer(traffic, asker, 0, [9, 10])
    told = asker.counters["prefill"]
    assert (told.prefetched, told.prefetched_used, told.bytes_loaded) == (3, 0, 5)
    assert (told.hits, told.demand_loads) == (0, 2)


def test_a_wide_layer_lets_the_next_be_read_into_slabs_whose_experts_have_run() -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(EXPERTS, shelf)
    run_layer(traffic, asker, 0, list(range(EXPERTS)), lasting=4)
    ahead = guesses(shelf, 1)
    assert ahead == list(range(len(ahead)))
    assert len(ahead) >= EXPERTS - 4 - TOP_K, "all slabs but the working set's and the reserve"
    assert guesses(shelf, 2) == []
    run_layer(traffic, asker, 1, list(range(EXPERTS)), lasting=4)
    assert sorted(e.expert for e, _ in shelf.order if e.layer == 1) == list(range(EXPERTS)), "each is read once"
    kept = [ExpertId(0, expert) for expert in range(4)]
    assert all(expert in traffic._cache for expert in kept), "decode's working set stays"


def test_demand_goes_on_with_what_is_there_and_reads_no_expert_twice() -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(EXPERTS, shelf)
    run_layer(traffic, asker, 0, list(range(EXPERTS)))
    shelf.deliver(2)
    there = guesses(shelf, 1)[:2]
    order = run_layer(traffic, asker, 1, list(range(EXPERTS)))
    assert order[:2] == there
    assert sorted(order) == list(range(EXPERTS))
    told = asker.counters["prefill"]
    assert told.accesses == 2 * EXPERTS == told.hits + told.demand_loads
    assert told.prefetched_used <= told.prefetched


def test_what_was_read_ahead_in_vain_leaves_the_queue_when_the_router_has_spoken() -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(2 * EXPERTS, shelf)
    run_layer(traffic, asker, 0, list(range(EXPERTS)))
    unwanted = guesses(shelf, 1)[-1]
    run_layer(traffic, asker, 1, [expert for expert in range(EXPERTS) if expert != unwanted])
    assert ExpertId(1, unwanted) not in traffic._cache
    told = asker.counters["prefill"]
    assert told.bytes_loaded == 2 * EXPERTS - 1 + sum(1 for t in shelf.open.values() if t.done)


@pytest.mark.parametrize(("experts", "read_ahead"), [(EXPERTS // 2, True), (EXPERTS, False)])
def test_a_narrow_layer_or_no_wish_reads_nothing_ahead(experts: int, read_ahead: bool) -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(EXPERTS, shelf, read_ahead)
    traffic.read_ahead(tokens=100 if not read_ahead else 1)
    run_layer(traffic, asker, 0, list(range(experts)))
    assert not any(guess for _, guess in shelf.order)


def test_decode_is_never_read_ahead() -> None:
    shelf, asker = Shelf(), Request()
    traffic = traffic_of(2 * EXPERTS, shelf)
    asker.phase = "decode"
    run_layer(traffic, asker, 0, list(range(EXPERTS)))
    assert not any(guess for _, guess in shelf.order)
