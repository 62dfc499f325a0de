from __future__ import annotations

import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vismmoe.errors import CheckpointError, UsageError
from vismmoe.experts import transfers as transfers_module
from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.host import HostTier
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.store import ExpertStore
from vismmoe.experts.transfers import CpuTransfers, CudaTransfers, Ticket
from vismmoe.types import ExpertId, ExpertLayout, PartShape

A, B, C, D, E = (ExpertId(1, number) for number in range(5))
READER = "vismmoe-reader-0"
HANG_S = 600  # a guard against waiting for ever, never a measure of speed


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("vismmoe-reader")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert readers() == []


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts count as large: they are read one at a time."""
    monkeypatch.setattr(transfers_module, "_BATCH_BYTES", 64)


@pytest.fixture
def large(plain_layout: Callable[..., Any], one_by_one: None) -> SlabPool:
    """Slabs of experts that are read one at a time."""
    return SlabPool(5, plain_layout())


def test_a_demand_fills_its_slab(fake_store: Callable[..., Any], plain_layout: Callable[..., Any]) -> None:
    store, slabs = fake_store(), SlabPool(3, plain_layout())
    with CpuTransfers(store, slabs) as transfers:
        ticket = transfers.demand(C, 2)
        assert transfers.ticket(C) is ticket
        assert ticket.wait() == 64
        assert ticket.done
        assert transfers.ticket(C) is None
    assert bytes(slabs.buffer(2)) == store.pattern(C, 64)


def test_demand_goes_before_speculation_and_speculation_by_priority(
    fake_store: Callable[..., Any], large: SlabPool
) -> None:
    store = fake_store(shut=True)
    with CpuTransfers(store, large) as transfers:
        transfers.demand(A, 0)
        assert store.started.acquire(timeout=HANG_S)  # the reader is busy with A while the others queue
        transfers.speculate_batch([(B, 1, 0.2), (C, 2, 0.9), (D, 3, 0.2)])
        transfers.demand(E, 4)
        store.gate.set()
        while store.order[-1:] != [D]:
            time.sleep(0.001)
    assert store.order == [A, E, C, B, D]


def test_a_guess_that_is_waited_for_overtakes_the_queue(fake_store: Callable[..., Any], large: SlabPool) -> None:
    store = fake_store(shut=True)
    with CpuTransfers(store, large) as transfers:
        first = transfers.speculate(A, 0, 0.9)
        assert store.started.acquire(timeout=HANG_S)
        transfers.speculate(B, 1, 0.8)
        wanted = transfers.speculate(C, 2, 0.1)
        opener = threading.Thread(target=lambda: store.started.acquire(timeout=HANG_S) and store.gate.set())
        opener.start()  # A's read ends no sooner than a second one has begun: the waiter's
        assert wanted.wait() == 64
        opener.join()
        first.wait()
        assert store.order[:2] == [A, C]
        assert store.batches[1][0] != READER  # the waiting thread did not wait for the busy reader


def test_a_promoted_guess_goes_before_all_guesses_without_anybody_waiting(
    fake_store: Callable[..., Any], large: SlabPool
) -> None:
    store = fake_store(shut=True)
    with CpuTransfers(store, large) as transfers:
        transfers.speculate(A, 0, 0.9)
        assert store.started.acquire(timeout=HANG_S)
        transfers.speculate(B, 1, 0.8)
        wanted = transfers.speculate(C, 2, 0.1)
        wanted.promote()
        assert not wanted.done
        store.gate.set()
        while B not in store.order:
            time.sleep(0.001)
        assert store.order == [A, C, B]
        wanted.wait()


def test_stale_guesses_are_dropped_unless_somebody_wants_them(fake_store: Callable[..., Any], large: SlabPool) -> None:
    store = fake_store(shut=True)
    with CpuTransfers(store, large) as transfers:
        transfers.speculate(A, 0, 0.9)
        assert store.started.acquire(timeout=HANG_S)  # A has begun: too late to drop it
        dropped = transfers.speculate(B, 1, 0.8)
        promoted = transfers.speculate(C, 2, 0.7)
        promoted.promote()
        transfers.speculate(D, 3, 0.6)
        demanded = transfers.demand(E, 4)
        assert transfers.drop_stale(keep=lambda expert: expert == D) == [B]
        assert transfers.ticket(B) is None
        with pytest.raises(RuntimeError, match="dropped"):
            dropped.wait()
        store.gate.set()
        promoted.wait()
        demanded.wait()
        again = transfers.demand(B, 1)
        again.wait()
        while D not in store.order:
            time.sleep(0.001)
    assert store.order.count(B) == 1


def test_drain_tells_of_each_finished_guess_once_and_of_no_demand(
    fake_store: Callable[..., Any], plain_layout: Callable[..., Any]
) -> None:
    store = fake_store(broken={B})
    with CpuTransfers(store, SlabPool(4, plain_layout())) as transfers:
        assert transfers.drain() == []
        transfers.speculate_batch([(A, 0, 0.5), (B, 1, 0.5), (C, 2, 0.1)])
        transfers.demand(D, 3).wait()
        waited = transfers.ticket(C)
        assert waited is not None
        waited.wait()
        told: list[Any] = []
        while len(told) < 2:
            told += transfers.drain()
        assert {ticket.expert: ticket.error is None for ticket in told} == {A: True, B: False}
        assert transfers.drain() == []
        assert all(transfers.ticket(expert) is None for expert in (A, B, C, D))


@pytest.mark.parametrize("error", [CheckpointError("the disk is gone"), OSError("gone"), ValueError("gone")])
def test_an_error_of_the_reader_is_a_checkpoint_error_of_the_waiter_and_all_goes_on(
    fake_store: Callable[..., Any], large: SlabPool, error: Exception
) -> None:
    store = fake_store(broken={A}, error=error)
    with CpuTransfers(store, large) as transfers:
        ticket = transfers.demand(A, 0)
        while not ticket.done:
            time.sleep(0.001)  # the reader, not the waiter, has met the error
        assert store.batches[0][0] == READER
        for _ in range(2):
            with pytest.raises(CheckpointError, match="gone"):
                ticket.wait()
        assert transfers.demand(B, 0).wait() > 0
        store.broken.clear()
        assert transfers.demand(A, 0).wait() > 0
        assert bytes(large.buffer(0)[:1]) == store.pattern(A, 1)


def test_of_a_batch_only_the_broken_expert_fails(
    fake_store: Callable[..., Any], plain_layout: Callable[..., Any]
) -> None:
    store, slabs = fake_store(broken={C}), SlabPool(5, plain_layout())
    with CpuTransfers(store, slabs) as transfers:
        tickets = transfers.demand_batch([(expert, slot) for slot, expert in enumerate((A, B, C, D, E))])
        for ticket in tickets:
            if ticket.expert == C:
                with pytest.raises(CheckpointError):
                    ticket.wait()
            else:
                ticket.wait()
                assert bytes(slabs.buffer(ticket.slot)) == store.pattern(ticket.expert, 64)


def test_small_experts_are_read_together_and_large_ones_one_by_one(
    fake_store: Callable[..., Any], plain_layout: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs = SlabPool(5, plain_layout())
    for batch_bytes, longest in ((1 << 20, 4), (64 * 2, 2), (10, 1)):
        monkeypatch.setattr(transfers_module, "_BATCH_BYTES", batch_bytes)
        store = fake_store(shut=True)
        with CpuTransfers(store, slabs) as transfers:
            transfers.demand(A, 0)
            assert store.started.acquire(timeout=HANG_S)
            tickets = transfers.demand_batch([(expert, slot) for slot, expert in enumerate((B, C, D, E), 1)])
            store.gate.set()
            for ticket in tickets:
                ticket.wait()
        assert max(len(batch) for _, batch in store.batches) == longest


def test_one_expert_has_one_transfer_at_a_time(fake_store: Callable[..., Any], large: SlabPool) -> None:
    with CpuTransfers(fake_store(), large) as transfers:
        ticket = transfers.demand(A, 0)
        with pytest.raises(RuntimeError, match="open already"):
            transfers.demand(A, 1)
        ticket.wait()


def test_close_cuts_off_the_queue_and_joins_the_threads(fake_store: Callable[..., Any], large: SlabPool) -> None:
    store = fake_store(shut=True)
    transfers = CpuTransfers(store, large, readers=2)
    running = transfers.demand_batch([(A, 0), (B, 1)])
    for _ in running:
        assert store.started.acquire(timeout=HANG_S)
    queued = transfers.speculate(C, 2)
    closing = threading.Thread(target=transfers.close)
    closing.start()
    while not queued.done:  # cut off before the running ones may end
        time.sleep(0.001)
    store.gate.set()
    closing.join()
    transfers.close()
    assert readers() == []
    assert [ticket.wait() for ticket in running] == [64] * 2
    with pytest.raises(RuntimeError, match="closed"):
        queued.wait()
    with pytest.raises(RuntimeError, match="closed"):
        transfers.demand(D, 3)


def test_no_reader_is_a_usage_error(fake_store: Callable[..., Any], large: SlabPool) -> None:
    with pytest.raises(UsageError, match="readers"):
        CpuTransfers(fake_store(), large, readers=0)


@pytest.mark.parametrize("busy_reader", [True, False])
def test_ctrl_c_while_waiting_leaves_no_thread_and_nobody_waiting_for_ever(
    fake_store: Callable[..., Any], large: SlabPool, busy_reader: bool
) -> None:
    blocked_in = threading.Condition.wait if busy_reader else threading.Event.wait  # for the reader; in its own read
    seen: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        """Only where the thread is blocked: found at the same instruction twice, however long it takes to get there."""
        within = {each.f_code for each, _ in traceback.walk_stack(frame)}
        seen.append(frame.f_lasti if {blocked_in.__code__, Ticket.wait.__code__} <= within else -len(seen))
        if seen[-2:-1] == seen[-1:]:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    store = fake_store(shut=True)
    transfers = CpuTransfers(store, large)
    ticket = transfers.demand(A, 0)
    assert store.started.acquire(timeout=HANG_S)
    if not busy_reader:  # the interrupt then hits the waiting thread in the middle of its own read
        ticket = transfers.demand(B, 1)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        store.gate.set()
    if not busy_reader:
        with pytest.raises(RuntimeError, match="interrupted"):
            ticket.wait()
    assert transfers.demand(C, 2).wait() > 0  # and the rest goes on
    transfers.close()


class Driver:
    """A pipeline in small: random layers through cache and transfers, every slab checked before it is used."""

    def __init__(self, cache: ExpertCache, transfers: CpuTransfers, check: Callable[[ExpertId, int], bool]) -> None:
        self.cache, self.transfers, self.check = cache, transfers, check
        self.failures = self.ran = 0

    def run_layer(self, layer: int, wanted: list[ExpertId], guesses: list[tuple[ExpertId, float]]) -> None:
        for ticket in self.transfers.drain():
            (self.cache.forget if ticket.error else self.cache.landed)(ticket.expert)
        for expert in self.transfers.drop_stale(lambda e: e.layer > layer):
            self.cache.forget(expert)
        waiting = list(wanted)
        while waiting:
            wave = self.take_wave(waiting)
            assert wave, "no progress"
            for expert in wave:
                self.run(expert)
            self.cache.release(wave)
            waiting = waiting[len(wave) :]
        self.cache.expire_layer(layer)
        for expert, priority in guesses:
            placement = self.cache.speculate(expert, priority)
            if placement is not None:
                self.transfers.speculate(expert, placement.slot, priority)
        self.cache.protect(expert for expert, _ in guesses)

    def take_wave(self, waiting: list[ExpertId]) -> list[ExpertId]:
        wave, placed = [], []
        for expert in waiting:
            if self.cache.lookup(expert) is None:
                placement = self.cache.require(expert)
                if placement is None:
                    break
                placed.append((expert, placement.slot))
            wave.append(expert)
        self.transfers.demand_batch(placed)
        return wave

    def run(self, expert: ExpertId) -> None:
        ticket = self.transfers.ticket(expert)
        try:
            if ticket is not None:
                ticket.wait()
                self.cache.landed(expert)
        except CheckpointError:
            self.cache.forget(expert)
            self.failures += 1
            return
        slot = self.cache.slot(expert)
        assert slot is not None
        assert self.check(expert, slot), f"wrong bytes for {expert}"
        self.ran += 1


@pytest.mark.parametrize(
    ("slabs", "batched", "copies"), [(1, True, 0), (4, False, 6), (12, True, 20), (12, False, 0), (48, False, 0)]
)
def test_random_layers_over_a_slow_and_failing_disk_never_see_wrong_bytes_and_never_hang(
    fake_store: Callable[..., Any],
    plain_layout: Callable[..., Any],
    request: pytest.FixtureRequest,
    slabs: int,
    batched: bool,
    copies: int,
) -> None:
    if not batched:
        request.getfixturevalue("one_by_one")
    dice = random.Random(slabs)
    store = fake_store(delay_s=0.0002)
    pool = SlabPool(slabs, plain_layout())
    cache = ExpertCache(slabs, reserve=min(4, slabs))
    host = HostTier(copies, plain_layout(), cache.frequency) if copies else None
    every = [ExpertId(layer, number) for layer in range(4) for number in range(12)]

    def check(expert: ExpertId, slot: int) -> bool:
        slab = pool.buffer(slot)
        return bytes(slab[:1]) == bytes(slab[-1:]) == store.pattern(expert, 1)

    with CpuTransfers(store, pool, readers=2, host=host) as transfers:
        driver = Driver(cache, transfers, check)
        for _ in range(30):
            store.broken = set(dice.sample(every, 2))
            cache.begin_step()
            for layer in range(4):
                mine = [expert for expert in every if expert.layer == layer]
                ahead = [expert for expert in every if expert.layer > layer]
                guesses = [(expert, dice.random()) for expert in dice.sample(ahead, min(5, len(ahead)))]
                driver.run_layer(layer, dice.sample(mine, dice.choice([1, 4, 4, 9])), guesses)
        store.broken = set()
        assert driver.failures > 0  # the test has met what it is about
        for layer in range(4):  # and everything is usable afterwards
            failures = driver.failures
            driver.run_layer(layer, [expert for expert in every if expert.layer == layer], [])
            for ticket in transfers.drain():
                (cache.forget if ticket.error else cache.landed)(ticket.expert)
            assert driver.failures - failures <= 5  # guesses that had failed before
    assert driver.ran > 300


class Disk:
    """Fills a slab with its expert's number; half-way through it fails for `broken`."""

    def __init__(self) -> None:
        self.broken: set[ExpertId] = set()

    @staticmethod
    def number(expert: ExpertId) -> bytes:
        return bytes([expert.layer * 16 + expert.expert])

    def read_batch(self, items: Sequence[tuple[ExpertId, memoryview]]) -> None:
        for expert, slab in items:
            slab[:32] = self.number(expert) * 32
            if expert in self.broken:
                raise OSError("the disk is gone")
            slab[32:] = self.number(expert) * 32


class TrafficWalk(RuleBasedStateMachine):
    """Cache, transfers and host tier walked at random over a disk that breaks and heals: right bytes or an error."""

    experts = st.builds(ExpertId, st.integers(0, 2), st.integers(0, 5))
    layout = ExpertLayout(torch.uint8, (PartShape("weight", (64,), False),), {}, 64)

    @initialize(slabs=st.integers(1, 9), readers=st.integers(1, 3), copies=st.integers(0, 6))
    def begin(self, slabs: int, readers: int, copies: int) -> None:
        self.store = Disk()
        self.pool = SlabPool(slabs, self.layout)
        self.cache = ExpertCache(slabs, reserve=min(2, slabs))
        self.host = HostTier(copies, self.layout, self.cache.frequency) if copies else None
        self.transfers = CpuTransfers(self.store, self.pool, readers, self.host)
        self.driver = Driver(self.cache, self.transfers, self.holds)

    def holds(self, expert: ExpertId, slot: int) -> bool:
        return bytes(self.pool.buffer(slot)) == self.store.number(expert) * 64

    @rule(layer=st.integers(0, 2), wanted=st.sets(st.integers(0, 5), min_size=1), guesses=st.sets(experts, max_size=4))
    def run_layer(self, layer: int, wanted: set[int], guesses: set[ExpertId]) -> None:
        ahead = [(expert, 0.1 * expert.expert) for expert in guesses if expert.layer > layer]
        before = self.driver.ran + self.driver.failures
        self.driver.run_layer(layer, [ExpertId(layer, number) for number in wanted], ahead)
        assert self.driver.ran + self.driver.failures == before + len(wanted)

    @rule()
    def begin_step(self) -> None:
        self.cache.begin_step()

    @rule(broken=st.sets(experts, max_size=3))
    def some_break(self, broken: set[ExpertId]) -> None:
        self.store.broken = broken

    @rule(expert=experts)
    def runs_where_it_lies(self, expert: ExpertId) -> None:
        if self.host is not None and (weights := self.host.run_here(expert)) is not None:
            assert bytes(weights["weight"].numpy()) == self.store.number(expert) * 64
            self.host.stop_running(expert)

    @invariant()
    def no_more_is_held_than_there_is_room_for(self) -> None:
        if hasattr(self, "cache"):
            assert len(self.cache) <= self.cache.slabs
            assert self.host is None or len(self.host) <= self.host.capacity

    def teardown(self) -> None:
        if hasattr(self, "transfers"):
            self.transfers.close()


TrafficWalk.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestTrafficWalk = TrafficWalk.TestCase


def test_the_real_store_feeds_the_slabs_through_evictions(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=3, experts=8)
    for direct_io in ("on", "off"):
        pool, cache = SlabPool(5, masters.layout), ExpertCache(5, reserve=2)
        with (
            ExpertStore.open(masters.layout, direct_io) as store,  # type: ignore[arg-type]
            CpuTransfers(store, pool, readers=2, host=HostTier(4, masters.layout, cache.frequency)) as transfers,
        ):

            def check(expert: ExpertId, slot: int, pool: SlabPool = pool) -> bool:
                return bytes(pool.buffer(slot)) == masters.truth[expert]

            driver = Driver(cache, transfers, check)
            for turn in range(10):
                for layer in range(3):
                    guesses = [(ExpertId(layer + 1, turn % 8), 0.5)] if layer < 2 else []
                    driver.run_layer(layer, [ExpertId(layer, (turn + n) % 8) for n in range(6)], guesses)
            assert cache.evictions > 50
            assert driver.ran == 180


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_experts_arrive_on_the_device_through_pinned_staging(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=3, experts=8)
    pool = SlabPool(5, masters.layout, "cuda")
    with ExpertStore.open(masters.layout) as store, CudaTransfers(store, pool, readers=2) as transfers:
        assert transfers.fallbacks == []

        def check(expert: ExpertId, slot: int) -> bool:
            return bytes(pool.bytes(slot).cpu().numpy()) == masters.truth[expert]

        driver = Driver(ExpertCache(5, reserve=2), transfers, check)
        for turn in range(20):
            for layer in range(3):
                guesses = [(ExpertId(layer + 1, turn % 8), 0.5)] if layer < 2 else []
                driver.run_layer(layer, [ExpertId(layer, (turn + n) % 8) for n in range(6)], guesses)
        assert driver.ran == 360


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_slab_is_not_overwritten_while_the_device_still_computes_with_it(plain_layout: Callable[..., Any]) -> None:
    class Ones:
        def read_batch(self, items: Any) -> None:
            for _, slab in items:
                slab[:] = b"\1" * len(slab)

    pool = SlabPool(1, plain_layout(1 << 20), "cuda")
    pool.bytes(0).zero_()
    with CudaTransfers(Ones(), pool) as transfers:
        torch.cuda._sleep(200_000_000)
        before = pool.bytes(0).clone()
        transfers.demand(A, 0).wait()
        after = pool.bytes(0).clone()
    assert int(before.max()) == 0
    assert int(after.min()) == 1
