"""The tier between disk and device: keeps what leaves, gives what goes up, never what is half there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vismmoe.experts.host import HostTier
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.transfers import CpuTransfers
from vismmoe.types import ExpertId, ExpertLayout, PartShape

SIZE = 64
LAYOUT = ExpertLayout(torch.uint8, (PartShape("weight", (SIZE,), False),), {}, SIZE)


def number(expert: ExpertId) -> int:
    return expert.layer * 16 + expert.expert


def tier(capacity: int, uses: dict[ExpertId, float] | None = None) -> HostTier:
    uses = uses or {}
    return HostTier(capacity, LAYOUT, lambda expert: uses.get(expert, 0.0))


def put(host: HostTier, expert: ExpertId) -> bool:
    def copy(row: torch.Tensor) -> None:
        row.fill_(number(expert))

    return host.offer(expert, copy)


def take(host: HostTier, expert: ExpertId) -> int | None:
    with host.moving_up(expert) as row:
        return None if row is None else int(row[0])


def test_what_went_up_is_no_longer_here() -> None:
    host = tier(2)
    assert put(host, ExpertId(0, 3))
    assert take(host, ExpertId(0, 3)) == 3
    assert take(host, ExpertId(0, 3)) is None
    assert (len(host), host.most) == (0, 1)


def test_only_what_is_worth_more_takes_another_s_place() -> None:
    often, seldom, never = ExpertId(0, 1), ExpertId(0, 2), ExpertId(0, 3)
    host = tier(1, {often: 2.0, seldom: 1.0})
    assert put(host, seldom)
    assert not put(host, never)
    assert put(host, often)
    assert seldom not in host
    assert not put(host, seldom)


def test_an_expert_that_runs_here_keeps_its_place() -> None:
    running, better = ExpertId(0, 1), ExpertId(0, 2)
    host = tier(1, {better: 9.0})
    assert put(host, running)
    weights = host.run_here(running)
    assert weights is not None
    assert not put(host, better)
    assert int(weights["weight"][0]) == number(running)
    host.stop_running(running)
    assert put(host, better)


def test_a_copy_that_fails_leaves_room_for_others() -> None:
    host = tier(1)

    def fail(row: torch.Tensor) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        host.offer(ExpertId(0, 1), fail)
    assert ExpertId(0, 1) not in host
    assert put(host, ExpertId(0, 2))


def test_an_expert_whose_way_up_failed_stays() -> None:
    host = tier(1)
    put(host, ExpertId(0, 1))
    with pytest.raises(OSError, match="no"), host.moving_up(ExpertId(0, 1)):
        raise OSError("no")
    assert take(host, ExpertId(0, 1)) == 1


def test_evicted_experts_come_back_from_memory_instead_of_disk(fake_store: Callable[..., Any]) -> None:
    store, slabs, host = fake_store(), SlabPool(1, LAYOUT), tier(3)
    wanted = [ExpertId(0, number) for number in range(3)]
    with CpuTransfers(store, slabs, host=host) as transfers:
        read = [transfers.demand(expert, 0).wait() for expert in (*wanted, *wanted)]
        assert bytes(slabs.buffer(0)) == store.pattern(wanted[-1], SIZE)
    assert read == [SIZE] * 3 + [0] * 3
    assert store.order == wanted


def test_many_readers_that_evict_and_bring_up_at_random_never_mix_bytes(fake_store: Callable[..., Any]) -> None:
    chance, store, slabs = random.Random(0), fake_store(), SlabPool(6, LAYOUT)
    host = HostTier(5, LAYOUT, lambda expert: chance.random())
    seen: list[int] = []
    with CpuTransfers(store, slabs, readers=4, host=host) as transfers:
        for _ in range(300):
            experts = chance.sample([ExpertId(0, n) for n in range(20)], 6)
            tickets = transfers.demand_batch(list(zip(experts, range(6), strict=True)))
            seen += [ticket.wait() for ticket in tickets]
            for slot, expert in enumerate(experts):
                assert bytes(slabs.buffer(slot)) == store.pattern(expert, SIZE)
    assert 0 in seen
    assert SIZE in seen


class TierWalk(RuleBasedStateMachine):
    """Random offers, ways up and runs: never more than there is room for, never another expert's bytes."""

    experts = st.builds(ExpertId, st.integers(0, 2), st.integers(0, 5))

    @initialize(capacity=st.integers(1, 5))
    def begin(self, capacity: int) -> None:
        self.uses: dict[ExpertId, float] = {}
        self.host = HostTier(capacity, LAYOUT, lambda expert: self.uses.get(expert, 0.0))
        self.running: list[tuple[ExpertId, torch.Tensor]] = []

    @rule(expert=experts, uses=st.integers(0, 3))
    def offer(self, expert: ExpertId, uses: int) -> None:
        self.uses[expert] = self.uses.get(expert, 0.0) + uses
        held = set(self.host._row_of)
        kept = put(self.host, expert)
        assert kept == (expert in self.host and expert not in held)
        if not kept and expert not in held:
            assert len(self.host) == self.host.capacity
            busy = {other for other, _ in self.running}
            assert all(self.uses[other] >= self.uses[expert] for other in held - busy)

    @rule(expert=experts)
    def move_up(self, expert: ExpertId) -> None:
        there, running = expert in self.host, any(other == expert for other, _ in self.running)
        assert take(self.host, expert) == (number(expert) if there else None)
        assert (expert in self.host) == (there and running)

    @rule(expert=experts)
    def run(self, expert: ExpertId) -> None:
        weights = self.host.run_here(expert)
        assert (weights is not None) == (expert in self.host)
        if weights is not None:
            self.running.append((expert, weights["weight"]))

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        if self.running:
            self.host.stop_running(self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))[0])

    @invariant()
    def all_is_in_its_place(self) -> None:
        if not hasattr(self, "host"):
            return
        assert len(self.host) + len(self.host._free) == self.host.capacity
        for expert, weight in self.running:
            assert set(weight.tolist()) == {number(expert)}


TierWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTierWalk = TierWalk.TestCase


def test_pinned_memory_that_is_not_to_be_had_is_replaced_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def denied(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of locked memory\nmore")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", denied)
    host = HostTier(2, LAYOUT, lambda expert: 0.0, pin=True)
    assert host.fallbacks == [
        "Pinned memory is not to be had (CUDA error: out of locked memory): host copies are pageable."
    ]
    assert put(host, ExpertId(0, 1))
