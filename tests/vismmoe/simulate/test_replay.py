"""A replay counts as the runtime does, takes the time that can be worked out by hand, and never beats Belady."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from vismmoe.errors import BudgetError, UsageError
from vismmoe.experts.policies import POLICIES
from vismmoe.simulate.foresight import RULES, LoggedGate, rule_foresight
from vismmoe.simulate.profile import DeviceProfile
from vismmoe.simulate.replay import Setting, belady_limit, simulate
from vismmoe.simulate.result import Span
from vismmoe.trace import TraceSet

EXPERT = 2_000_000


def setting(traces: TraceSet, device: DeviceProfile, slots: int = 2, **more: int) -> Setting:
    return Setting.of(traces, device, slots=slots, expert_bytes=EXPERT, **more)


def test_on_demand_every_miss_is_waited_for(make_traces: Callable[..., TraceSet], device: DeviceProfile) -> None:
    traces = make_traces([[{0: [1], 1: [1]}, {0: [1], 1: [2]}]])
    result = simulate(setting(traces, device, slots=4), policy="lru")
    assert (result.prefill.accesses, result.prefill.demand_loads, result.prefill.hits) == (2, 2, 0)
    assert (result.decode.accesses, result.decode.demand_loads, result.decode.hits) == (2, 1, 1)
    assert result.prefill.stall_ms == pytest.approx(20.0)
    assert result.decode.stall_ms == pytest.approx(10.0)
    assert result.prefill_ms == pytest.approx(2 * (4 + 1) + 20)
    assert result.decode_ms == pytest.approx(2 * (4 + 1) + 10)
    assert result.tokens_per_s == pytest.approx(1e3 / 20)
    assert result.bytes_loaded == 3 * EXPERT


def test_a_read_ahead_overlaps_with_the_layers_before(
    make_traces: Callable[..., TraceSet], device: DeviceProfile
) -> None:
    """Layer 0 is pinned. Next gate orders layer 1's expert at 4 ms, which is there at 14; layer 1 asks at 4+1+4 = 9,
    waits 5, runs until 15. Layer 2's was ordered with it and comes at 24; asked for at 15+4 = 19: 5 more."""
    traces = make_traces([[{0: [0], 1: [3], 2: [5]}]], prefix=1)
    spans: list[Span] = []
    result = simulate(setting(traces, device, slots=4), foresight=LoggedGate(2), spans=spans)
    assert result.prefill.stall_ms == pytest.approx(10.0)
    assert (result.prefill.hits, result.prefill.prefetched, result.prefill.prefetched_used) == (2, 2, 2)
    assert [(s.start, s.end) for s in spans if s.kind == "stall"] == [
        pytest.approx((0.009, 0.014)), pytest.approx((0.019, 0.024))
    ]  # fmt: skip


def test_a_slow_model_hides_every_read(make_traces: Callable[..., TraceSet], device: DeviceProfile) -> None:
    traces = make_traces([[{0: [0], 1: [3], 2: [5]}]], prefix=1)
    slow = replace(device, layer_ms=20.0)
    assert simulate(setting(traces, slow, slots=4), foresight=LoggedGate(2)).stall_ms == 0
    assert simulate(setting(traces, slow, slots=4)).stall_ms == pytest.approx(20.0)


def test_what_stays_in_host_memory_comes_over_the_link(
    make_traces: Callable[..., TraceSet], device: DeviceProfile
) -> None:
    traces = make_traces([[{0: [1]}, {0: [2]}, {0: [1]}]])
    linked = replace(device, link_rate=2_000_000_000, link_ms=0.0)
    from_disk = simulate(setting(traces, linked, slots=1))
    assert from_disk.stall_ms == pytest.approx(3 * (10 + 1))
    some = simulate(setting(traces, replace(linked, host_memory=2 * EXPERT), slots=1))
    assert some.stall_ms == pytest.approx(2 * (10 + 1) + 1)
    all_of_them = simulate(setting(traces, replace(linked, host_memory=8 * EXPERT), slots=1))
    assert all_of_them.stall_ms == pytest.approx(3 * 1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", ["none", *RULES])
def test_no_rule_beats_belady_and_all_counts_add_up(
    policy: str, rule: str, random_traces: Callable[[int], TraceSet], device: DeviceProfile
) -> None:
    for seed, slots in ((0, 6), (1, 20), (2, 40)):
        traces = random_traces(seed)
        place = setting(traces, device, slots=slots)
        foresight = None if rule == "none" else rule_foresight(rule, traces, 2)
        result, limit = simulate(place, policy=policy, foresight=foresight), belady_limit(place)
        for phase in (result.prefill, result.decode, limit.prefill, limit.decode):
            assert phase.hits + phase.demand_loads == phase.accesses
        assert result.prefill.accesses == limit.prefill.accesses > 0
        assert result.decode.accesses == limit.decode.accesses > 0
        loads = result.prefill.demand_loads + result.decode.demand_loads
        assert result.bytes_loaded >= loads * EXPERT
        if rule == "none":
            assert result.bytes_loaded == loads * EXPERT
            assert loads >= limit.prefill.demand_loads + limit.decode.demand_loads
        assert result.bytes_loaded >= limit.bytes_loaded
        assert result.stall_ms >= limit.stall_ms
        busy = result.prefill_ms + result.decode_ms - result.stall_ms
        assert busy == pytest.approx(limit.prefill_ms + limit.decode_ms - limit.stall_ms)


def test_a_replay_says_the_same_twice(random_traces: Callable[[int], TraceSet], device: DeviceProfile) -> None:
    traces = random_traces(3)
    one, two = (
        simulate(setting(traces, device, slots=9), foresight=rule_foresight("chance", traces, 2)) for _ in range(2)
    )
    assert one == two


def test_a_slower_disk_and_fewer_slots_cost_more(
    random_traces: Callable[[int], TraceSet], device: DeviceProfile
) -> None:
    traces = random_traces(4)
    usual = simulate(setting(traces, device, slots=20), policy="lru").stall_ms
    assert simulate(setting(traces, replace(device, disk_rate=10**8), slots=20), policy="lru").stall_ms > usual
    assert simulate(setting(traces, device, slots=5), policy="lru").stall_ms > usual


def test_when_all_experts_have_a_slab_each_is_loaded_once(
    random_traces: Callable[[int], TraceSet], device: DeviceProfile
) -> None:
    traces = random_traces(5)
    result = simulate(setting(traces, device, slots=1000))
    assert result.slots == 4 * 16
    assert result.evictions == 0
    assert result.bytes_loaded == belady_limit(setting(traces, device, slots=1000)).bytes_loaded


def test_what_does_not_fit_the_device_is_refused(
    random_traces: Callable[[int], TraceSet], device: DeviceProfile
) -> None:
    small = replace(device, device_memory=20 * EXPERT)
    setting(random_traces(0), small, slots=4)  # and 16 pinned
    with pytest.raises(BudgetError, match="5 slots and 1 pinned layers take"):
        setting(random_traces(0), small, slots=5)
    with pytest.raises(UsageError, match="All 5 MoE layers are pinned"):
        setting(random_traces(0), device, pinned_layers=5)
