from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vismmoe.experts.cache import ExpertCache, Placement, Standing
from vismmoe.experts.policies import POLICIES, EvictionPolicy, Use, get_policy
from vismmoe.types import ExpertId

LAYERS, EXPERTS = 3, 5
experts = st.builds(ExpertId, st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))


def filled(slabs: int, *wanted: ExpertId, reserve: int = 1, policy: str = "published") -> ExpertCache:
    """A cache in which these were demanded by a step before, and have expired."""
    cache = ExpertCache(slabs, reserve, get_policy(policy))
    for expert in wanted:
        assert cache.require(expert) is not None
        cache.landed(expert)
        cache.release([expert])
    cache.begin_step()
    return cache


def test_no_slabs_means_no_placement() -> None:
    cache = ExpertCache(0)
    assert cache.lookup(ExpertId(0, 0)) is None
    assert cache.require(ExpertId(0, 0)) is None
    assert cache.speculate(ExpertId(0, 0), 1.0) is None
    cache.protect([ExpertId(0, 0)])
    cache.expire_layer(0)
    cache.begin_step()
    assert len(cache) == 0


def test_one_slab_serves_any_number_of_experts_one_after_the_other() -> None:
    cache = ExpertCache(1)
    for number in range(5):
        expert = ExpertId(0, number)
        assert cache.require(expert) == Placement(0, ExpertId(0, number - 1) if number else None)
        assert cache.require(ExpertId(1, 0)) is None  # the only slab is held
        cache.landed(expert)
        cache.release([expert])
    assert cache.evictions == 4


def test_a_batch_larger_than_the_slabs_is_split_and_never_loses_what_it_holds() -> None:
    cache = ExpertCache(2)
    first, second, third = (ExpertId(0, number) for number in range(3))
    for expert in (first, second):
        assert cache.require(expert) is not None
        cache.landed(expert)
    assert cache.require(third) is None
    assert cache.slot(first) is not None
    assert cache.slot(second) is not None
    cache.release([first])
    assert cache.require(third) == Placement(0, first)


def test_a_hit_of_the_running_layer_is_not_evicted_by_a_miss_of_the_same_layer() -> None:
    old, hit, miss = ExpertId(0, 0), ExpertId(1, 1), ExpertId(1, 2)
    cache = filled(2, hit, old)  # `hit` is the longest unused one
    assert cache.lookup(hit) == 0
    assert cache.require(miss) == Placement(1, old)


def test_the_lowest_priority_leaves_first_and_among_equals_the_longest_unused() -> None:
    a, b, c = (ExpertId(0, number) for number in range(3))
    cache = filled(3, a, b, c)
    cache.prioritise({a: 0.9, b: 0.1, c: 0.1})
    leaving = [cache.require(ExpertId(1, number)) for number in range(3)]
    assert [placement and placement.evicted for placement in leaving] == [b, c, a]


def test_demand_takes_expired_before_guesses_and_guesses_before_protected_ones() -> None:
    expired, guess, protected = (ExpertId(2, number) for number in range(3))
    cache = filled(3, expired)
    for expert in (guess, protected):
        assert cache.speculate(expert, 0.5) is not None
        cache.landed(expert)
    cache.protect([protected])
    assert [cache.standing(e) for e in (expired, guess, protected)] == [
        Standing.EXPIRED,
        Standing.SPECULATIVE,
        Standing.REQUIRED,
    ]
    leaving = [cache.require(ExpertId(0, number)) for number in range(4)]
    assert [placement and placement.evicted for placement in leaving] == [expired, guess, protected, None]
    assert leaving[3] is None


def test_a_guess_never_takes_the_slab_of_what_this_step_demanded() -> None:
    cache = filled(2, ExpertId(0, 0))
    assert cache.require(ExpertId(0, 1)) is not None
    cache.landed(ExpertId(0, 1))
    cache.lookup(ExpertId(0, 0))
    cache.expire_layer(0)
    assert cache.speculate(ExpertId(1, 0), 1.0) is None
    cache.begin_step()
    assert cache.speculate(ExpertId(1, 0), 1.0) == Placement(1, ExpertId(0, 1))  # (0, 0) was used after it


def test_a_better_guess_replaces_a_worse_one_that_nothing_protects() -> None:
    cache = ExpertCache(3, reserve=1)
    low, high = ExpertId(1, 0), ExpertId(1, 1)
    for expert, priority in ((low, 0.2), (high, 0.8)):
        assert cache.speculate(expert, priority) is not None
        cache.landed(expert)
    assert cache.require(ExpertId(0, 0)) is not None
    assert cache.speculate(ExpertId(2, 0), 0.2) is None
    assert cache.speculate(ExpertId(2, 0), 0.3) == Placement(0, low)
    cache.protect([high])
    cache.landed(ExpertId(2, 0))
    assert cache.speculate(ExpertId(2, 1), 0.9) == Placement(0, ExpertId(2, 0))


def test_guesses_in_flight_leave_the_reserve_to_demand() -> None:
    cache = ExpertCache(4, reserve=3)
    assert cache.speculate(ExpertId(1, 0), 1.0) is not None
    assert cache.speculate(ExpertId(1, 1), 1.0) is None
    cache.expire_layer(1)  # its layer passed while it was in flight: its slab is still not to be had
    assert cache.speculate(ExpertId(1, 1), 1.0) is None
    cache.landed(ExpertId(1, 0))
    assert cache.speculate(ExpertId(1, 1), 1.0) is not None
    cache.lookup(ExpertId(1, 1))  # demand has met it
    assert cache.speculate(ExpertId(1, 2), 1.0) is not None


def test_the_newest_lookahead_list_replaces_the_one_before() -> None:
    cache = filled(3, ExpertId(0, 0))
    assert cache.speculate(ExpertId(0, 1), 0.5) is not None
    cache.landed(ExpertId(0, 1))
    cache.protect([ExpertId(0, 0), ExpertId(0, 1), ExpertId(2, 2)])
    assert {cache.standing(e) for e in cache.residents()} == {Standing.REQUIRED}
    cache.protect([])
    assert cache.standing(ExpertId(0, 0)) is Standing.EXPIRED
    assert cache.standing(ExpertId(0, 1)) is Standing.SPECULATIVE


def test_a_forecast_that_did_not_come_true_loses_its_weight() -> None:
    cache = ExpertCache(3, policy=get_policy("published"))
    assert cache.speculate(ExpertId(0, 0), 0.9) is not None
    cache.landed(ExpertId(0, 0))
    assert cache.require(ExpertId(0, 1)) is not None
    cache.landed(ExpertId(0, 1))
    cache.prioritise({ExpertId(0, 1): 0.1})
    cache.expire_layer(0)
    assert cache.require(ExpertId(1, 0)) is not None
    assert cache.require(ExpertId(1, 1)) == Placement(0, ExpertId(0, 0))


def test_old_praise_fades_with_each_visit_of_the_layer_without_a_use() -> None:
    praised, used = ExpertId(0, 0), ExpertId(0, 1)
    cache = filled(2, praised, used)
    cache.prioritise({praised: 0.9, used: 0.3})
    for _ in range(2):
        cache.begin_step()
        cache.lookup(used)
        cache.expire_layer(0)
    assert cache.require(ExpertId(1, 0)) == Placement(0, praised)


def test_locked_experts_stay_whatever_their_standing() -> None:
    cache = filled(1, ExpertId(0, 0))
    cache.lock(ExpertId(0, 0))
    cache.lock(ExpertId(0, 0))
    cache.unlock(ExpertId(0, 0))
    assert cache.require(ExpertId(0, 1)) is None
    cache.unlock(ExpertId(0, 0))
    assert cache.require(ExpertId(0, 1)) == Placement(0, ExpertId(0, 0))


def test_a_forgotten_transfer_gives_its_slab_back() -> None:
    cache = ExpertCache(2)
    assert cache.speculate(ExpertId(0, 0), 0.5) is not None
    assert cache.require(ExpertId(0, 1)) is not None
    cache.forget(ExpertId(0, 0))
    cache.forget(ExpertId(0, 1))
    assert len(cache) == 0
    assert cache.require(ExpertId(0, 0)) == Placement(1, None)
    assert cache.require(ExpertId(0, 1)) == Placement(0, None)
    assert cache.evictions == 0


def test_with_a_slab_for_everything_nothing_is_ever_evicted() -> None:
    cache = ExpertCache(LAYERS * EXPERTS)
    for _ in range(3):
        cache.begin_step()
        for layer in range(LAYERS):
            for expert in (ExpertId(layer, number) for number in range(EXPERTS)):
                if cache.lookup(expert) is None:
                    assert cache.require(expert) is not None
                    cache.landed(expert)
            cache.expire_layer(layer)
    assert cache.evictions == 0
    assert len(cache) == LAYERS * EXPERTS


def demand(cache: ExpertCache, expert: ExpertId, passing: bool = False) -> ExpertId | None:
    """One use from lookup to release; who was evicted for it."""
    placement = None
    if cache.lookup(expert, passing) is None:
        placement = cache.require(expert, passing)
        assert placement is not None
        cache.landed(expert)
    cache.release([expert])
    return placement.evicted if placement else None


def test_what_passes_through_takes_few_slabs_and_leaves_the_working_set_alone() -> None:
    wanted = [ExpertId(0, number) for number in range(16)]
    cache = filled(16, *wanted, reserve=2)
    waiting = [ExpertId(1, number) for number in range(60)]
    while waiting:  # waves as wide as the cache allows
        wave = []
        while waiting and cache.require(waiting[0], passing=True) is not None:
            cache.landed(waiting[0])
            wave.append(waiting.pop(0))
        assert len(wave) == cache.passage == 4
        cache.release(wave)
    assert len(set(wanted) & set(cache.residents())) == 12
    cache.begin_step()
    leaving = [demand(cache, ExpertId(2, number)) for number in range(4)]
    assert {expert.layer for expert in leaving if expert} == {1}, "what passed through leaves before the working set"


def test_a_use_by_a_prefill_is_no_use_and_a_later_real_one_settles_the_expert() -> None:
    often, passing, other = (ExpertId(0, number) for number in range(3))
    cache = filled(3, often, often_used := ExpertId(1, 0), policy="lru")
    demand(cache, passing, passing=True)
    demand(cache, often, passing=True)  # still the longest unused
    demand(cache, passing)
    assert demand(cache, other) == often
    assert often_used in cache


def test_the_least_frequent_leaves_first_and_the_evicted_are_remembered() -> None:
    often, seldom = ExpertId(0, 0), ExpertId(0, 1)
    cache = ExpertCache(2, policy=get_policy("lfu"))
    for _ in range(3):
        demand(cache, often)
    demand(cache, seldom)
    assert demand(cache, ExpertId(0, 2)) == seldom
    assert demand(cache, seldom) == ExpertId(0, 2), "used twice by now, which the cache remembers"
    assert often in cache


def test_the_chance_of_an_expert_is_its_share_of_its_layers_visits() -> None:
    cache = ExpertCache(4)
    always, half, never = (ExpertId(0, number) for number in range(3))
    for visit in range(64):
        cache.begin_step()
        demand(cache, always)
        if visit % 2:
            demand(cache, half)
        cache.expire_layer(0)
    assert cache.chance(always) == pytest.approx(1.0)
    assert cache.chance(half) == pytest.approx(0.5, abs=0.02)
    assert cache.chance(never) == cache.chance(ExpertId(1, 0)) == 0.0


def test_nobody_leaves_for_a_guess_that_is_less_likely() -> None:
    cache = ExpertCache(2)
    often, seldom, guess = (ExpertId(0, number) for number in range(3))
    for visit in range(4):
        cache.begin_step()
        demand(cache, often)
        if not visit:
            demand(cache, seldom)
        cache.expire_layer(0)
    cache.begin_step()
    assert cache.speculate(guess, 0.2, chance=0.2) is None, "the one that leaves first was used one time in four"
    assert cache.speculate(guess, 0.6, chance=0.6) == Placement(1, seldom)
    cache.landed(guess)
    assert cache.speculate(ExpertId(0, 3), 0.9, chance=0.9) is None


def test_old_uses_fade_from_the_frequency() -> None:
    old, new = Use(), Use()
    for _ in range(8):
        old.used(0)
    for _ in range(2):
        new.used(200)
    assert get_policy("lfu").worth(old) < get_policy("lfu").worth(new)


def test_who_was_left_out_when_its_layer_ran_leaves_first_then_who_ran_last() -> None:
    stale, ahead, behind = ExpertId(0, 0), ExpertId(2, 0), ExpertId(1, 0)
    cache = filled(3, stale, ahead, policy="least-stale")
    cache.expire_layer(0)  # without a use of `stale`
    demand(cache, behind)
    assert demand(cache, ExpertId(1, 1)) == stale
    assert demand(cache, ExpertId(1, 2)) == ExpertId(1, 1), "the one used last has the longest way to its next use"
    assert ahead in cache


@dataclass
class Seen:
    """What the naive model below knows of one resident; the same words as in the cache, kept independently."""

    slot: int
    passing: bool
    held: bool = False
    protected: bool = False
    guess: bool = False
    airborne: bool = False
    in_flight: bool = True
    locks: int = 0
    demanded: int = -1

    @property
    def movable(self) -> bool:
        return not (self.held or self.protected or self.in_flight or self.locks)


class CacheWalk(RuleBasedStateMachine):
    """Random walks beside a model that looks at every resident each time: same answers, victims, standings."""

    @initialize(slabs=st.integers(0, 8), reserve=st.integers(1, 4), policy=st.sampled_from(list(POLICIES.values())))
    def begin(self, slabs: int, reserve: int, policy: EvictionPolicy) -> None:
        self.cache = ExpertCache(slabs, reserve, policy)
        self.policy = policy
        self.reserve = reserve
        self.seen: dict[ExpertId, Seen] = {}
        self.uses: dict[ExpertId, Use] = {}
        self.visits = dict.fromkeys(range(LAYERS), 0)
        self.tick = self.step = 0

    def order(self, expert: ExpertId) -> Any:
        seen, use = self.seen[expert], self.uses[expert]
        worth = (use.priority, use.last) if seen.guess else self.policy.worth(use)
        return not seen.passing, worth

    def first(self, among: dict[ExpertId, Seen]) -> ExpertId | None:
        return min(among, key=self.order, default=None)

    @property
    def passing(self) -> int:
        return sum(s.passing for s in self.seen.values())

    def movable(self, **wanted: bool) -> dict[ExpertId, Seen]:
        return {e: s for e, s in self.seen.items() if s.movable and all(getattr(s, k) == v for k, v in wanted.items())}

    def put(
        self, expert: ExpertId, placement: Placement | None, victim: ExpertId | None, priority: float, passing: bool
    ) -> bool:
        full = len(self.seen) == self.cache.slabs
        if placement is None:
            return False
        assert placement.evicted == (victim if full else None)
        if full:
            assert victim is not None
            assert self.seen.pop(victim).slot == placement.slot
        assert placement.slot not in {s.slot for s in self.seen.values()}
        self.tick += 1
        use = self.uses.setdefault(expert, Use())
        use.last, use.priority, use.missed = self.tick, priority, 0
        self.seen[expert] = Seen(placement.slot, passing)
        return True

    def hold(self, expert: ExpertId, passing: bool) -> None:
        seen = self.seen[expert]
        seen.held, seen.guess, seen.airborne, seen.demanded = True, False, False, self.step
        if not passing:
            self.tick += 1
            self.uses[expert].last = self.tick
            self.uses[expert].used(self.visits[expert.layer])
            seen.passing = False

    def victim_of_demand(self, layer: int, passing: bool) -> ExpertId | None:
        confined = passing and self.passing >= self.cache.passage
        if confined:
            for guess in (False, True):  # the first in order must itself pass through
                found = self.first(self.movable(guess=guess))
                if found is not None and self.seen[found].passing:
                    return found
            if any(s.passing and s.held for e, s in self.seen.items() if e.layer == layer):
                return None
        victim = self.first(self.movable(guess=False))
        if victim is None:
            victim = self.first(self.movable(guess=True))
        if victim is None:
            idle = {e for e, s in self.seen.items() if s.protected and not (s.held or s.in_flight or s.locks)}
            victim = min(idle, key=lambda e: (self.uses[e].priority, self.uses[e].last), default=None)
        return victim

    @rule(expert=experts, passing=st.booleans())
    def demand(self, expert: ExpertId, passing: bool) -> None:
        slot = self.cache.lookup(expert, passing)
        if expert in self.seen:
            assert slot == self.seen[expert].slot
            self.hold(expert, passing)
            return
        assert slot is None
        victim = self.victim_of_demand(expert.layer, passing)
        placement = self.cache.require(expert, passing)
        full = len(self.seen) == self.cache.slabs
        assert (placement is None) == (full and victim is None)
        quiet = all(not (s.held or s.locks or (s.in_flight and not s.airborne)) for s in self.seen.values())
        if quiet and self.cache.slabs:
            assert placement is not None  # the promise that rules out a deadlock
        if self.put(expert, placement, victim, 0.0, passing):
            self.hold(expert, passing)

    @rule(expert=experts, priority=st.sampled_from([0.0, 0.1, 0.5, 0.9]), passing=st.booleans())
    def speculate(self, expert: ExpertId, priority: float, passing: bool) -> None:
        confined = passing and self.passing >= self.cache.passage
        old = {e: s for e, s in self.movable(guess=False).items() if s.passing or s.demanded != self.step}
        victim = self.first(old)
        if victim is None or (confined and not self.seen[victim].passing):
            victim = self.first(self.movable(guess=True))
            if victim is not None and self.uses[victim].priority >= priority:
                victim = None
            if victim is not None and confined and not self.seen[victim].passing:
                victim = None
        airborne = sum(s.airborne for s in self.seen.values())
        allowed = expert not in self.seen and airborne < self.cache.slabs - self.reserve
        placement = self.cache.speculate(expert, priority, passing)
        full = len(self.seen) == self.cache.slabs
        assert (placement is not None) == (allowed and not (full and victim is None))
        if self.put(expert, placement, victim, priority, passing):
            self.seen[expert].guess = self.seen[expert].airborne = True

    @rule(data=st.data())
    def land_or_fail(self, data: st.DataObject) -> None:
        flying = sorted(e for e, s in self.seen.items() if s.in_flight)
        if not flying:
            return
        expert = data.draw(st.sampled_from(flying))
        if self.seen[expert].locks or data.draw(st.booleans()):
            self.cache.landed(expert)
            self.seen[expert].in_flight = self.seen[expert].airborne = False
        else:
            self.cache.forget(expert)
            del self.seen[expert]

    @rule(wanted=st.sets(experts, max_size=6))
    def release(self, wanted: set[ExpertId]) -> None:
        self.cache.release(wanted)
        for expert in wanted & set(self.seen):
            seen = self.seen[expert]
            seen.held = seen.guess = seen.protected = False

    @rule(layer=st.integers(0, LAYERS - 1))
    def expire_layer(self, layer: int) -> None:
        self.cache.expire_layer(layer)
        self.visits[layer] += 1
        for expert, seen in self.seen.items():
            if expert.layer == layer:
                if seen.guess:
                    self.uses[expert].priority = 0.0
                if seen.demanded != self.step:
                    self.uses[expert].priority /= 2
                    self.uses[expert].missed += 1
                seen.held = seen.guess = seen.protected = False

    @rule()
    def begin_step(self) -> None:
        self.cache.begin_step()
        self.step += 1

    @rule(wanted=st.sets(experts, max_size=6))
    def protect(self, wanted: set[ExpertId]) -> None:
        self.cache.protect(wanted)
        for expert, seen in self.seen.items():
            seen.protected = expert in wanted

    @rule(scores=st.dictionaries(experts, st.sampled_from([0.0, 0.2, 0.5, 0.7]), max_size=5))
    def prioritise(self, scores: dict[ExpertId, float]) -> None:
        self.cache.prioritise(scores)
        for expert in set(scores) & set(self.seen):
            self.uses[expert].priority = scores[expert]

    @rule(data=st.data())
    def lock_or_unlock(self, data: st.DataObject) -> None:
        if not self.seen:
            return
        expert = data.draw(st.sampled_from(sorted(self.seen)))
        if self.seen[expert].locks and data.draw(st.booleans()):
            self.cache.unlock(expert)
            self.seen[expert].locks -= 1
        else:
            self.cache.lock(expert)
            self.seen[expert].locks += 1

    @invariant()
    def both_tell_the_same(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert set(self.cache.residents()) == set(self.seen)
        assert len(self.cache) == len(self.seen) <= self.cache.slabs
        assert self.cache._passing == self.passing
        for expert, seen in self.seen.items():
            assert self.cache.slot(expert) == seen.slot < self.cache.slabs
            assert self.cache.in_flight(expert) == seen.in_flight
            standing: Any = Standing.SPECULATIVE if seen.guess else Standing.EXPIRED
            assert self.cache.standing(expert) is (Standing.REQUIRED if seen.held or seen.protected else standing)


CacheWalk.TestCase.settings = settings(max_examples=80, stateful_step_count=60)
TestCacheWalk = CacheWalk.TestCase


@pytest.mark.parametrize("slabs", [1, 8, 40])
def test_the_order_of_eviction_does_not_grow_with_time(slabs: int) -> None:
    cache = filled(slabs, *(ExpertId(0, number) for number in range(slabs)))
    for turn in range(3000):
        cache.prioritise({ExpertId(0, turn % slabs): float(turn % 7)})
    heaps = cache._order
    assert len(heaps._earlier) + len(heaps._current) + len(heaps._guesses) <= 3 * (4 * slabs + 65)
