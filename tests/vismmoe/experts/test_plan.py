from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vismmoe.errors import BudgetError, UsageError
from vismmoe.experts.plan import Machine, MemoryPlan, plan_memory
from vismmoe.types import ModelBytes

# Qwen3-VL-30B-A3B in bf16: 48 layers, 128 experts of 9.44 MB, top-8.
LARGE = ModelBytes(
    backbone=3_400_000_000,
    vision=1_150_000_000,
    shared_experts=0,
    expert_bytes=3 * 2048 * 768 * 2,
    experts_per_layer=128,
    moe_layers=48,
    kv_bytes_per_token=98_304,
    activation_bytes=500_000_000,
    staging_bytes=20_000_000,
    top_k=8,
)


def plan(sizes: ModelBytes, budget: int | None, prefix: int = 0, context: int = 0, host: int = 0) -> MemoryPlan:
    return plan_memory(
        sizes, device_budget_bytes=budget, host_budget_bytes=host, prefix_layers=prefix, context_tokens=context
    )


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelBytes, int]:
    """Sizes and a number of prefix layers."""
    experts = draw(st.integers(1, 40))
    layers = draw(st.integers(1, 12))
    some = st.integers(0, 10_000)
    sizes = ModelBytes(
        backbone=draw(some),
        vision=draw(some),
        shared_experts=draw(some),
        expert_bytes=draw(st.integers(1, 1000)),
        experts_per_layer=experts,
        moe_layers=layers,
        kv_bytes_per_token=draw(st.integers(0, 50)),
        activation_bytes=draw(some),
        staging_bytes=draw(some),
        top_k=draw(st.integers(1, experts)),
        slack_bytes=draw(st.integers(0, 50)),
    )
    return sizes, draw(st.integers(0, layers))


@given(models(), st.integers(0, 1_000_000), st.integers(0, 300), st.integers(0, 500_000))
def test_planned_parts_add_up_and_never_exceed_the_budget(
    model: tuple[ModelBytes, int], extra: int, context: int, host: int
) -> None:
    sizes, prefix = model
    least = plan(sizes, None, prefix, context).minimum_bytes
    made = plan(sizes, least + extra, prefix, context, host)
    assert made.planned_bytes <= made.budget_bytes == least + extra
    assert made.planned["pinned_experts"] == made.pinned_layers * sizes.experts_per_layer * sizes.slab_bytes
    assert made.planned["slabs"] == made.slabs * sizes.slab_bytes
    assert made.planned["kv"] == context * sizes.kv_bytes_per_token
    assert prefix <= made.pinned_layers <= sizes.moe_layers
    # What lies nowhere on the device lies below it, each expert once.
    offloaded = (sizes.moe_layers - made.pinned_layers) * sizes.experts_per_layer
    copies, left = made.host["expert_copies"] / sizes.slab_bytes, made.disk["experts"] / sizes.expert_bytes
    assert copies + left == offloaded
    assert made.host["expert_copies"] <= host


@given(models(), st.integers(0, 1_000_000))
def test_a_layer_can_always_run_one_token(model: tuple[ModelBytes, int], extra: int) -> None:
    sizes, prefix = model
    made = plan(sizes, plan(sizes, None, prefix).minimum_bytes + extra, prefix)
    assert made.slabs >= sizes.top_k or made.pinned_layers == sizes.moe_layers
    assert made.cycle_slabs == sizes.top_k * (sizes.moe_layers - made.pinned_layers)


@given(models(), st.integers(0, 300))
def test_the_minimum_really_is_the_least_that_is_accepted(model: tuple[ModelBytes, int], context: int) -> None:
    sizes, prefix = model
    least = plan(sizes, None, prefix, context).minimum_bytes
    assert plan(sizes, least, prefix, context).minimum_bytes == least
    with pytest.raises(BudgetError):
        plan(sizes, least - 1, prefix, context)


@given(models(), st.integers(0, 200_000), st.integers(0, 200_000))
def test_more_memory_never_holds_fewer_experts(model: tuple[ModelBytes, int], extra: int, more: int) -> None:
    sizes, prefix = model

    def held(budget: int) -> int:
        made = plan(sizes, budget, prefix)
        return made.pinned_layers * sizes.experts_per_layer + made.slabs

    least = plan(sizes, None, prefix).minimum_bytes
    assert held(least + extra) <= held(least + extra + more)


@given(models())
def test_everything_is_resident_from_exactly_the_named_budget_on(model: tuple[ModelBytes, int]) -> None:
    sizes, prefix = model
    full = plan(sizes, None, prefix).all_resident_bytes
    made = plan(sizes, full, prefix)
    assert (made.pinned_layers, made.slabs, made.planned_bytes) == (sizes.moe_layers, 0, full)
    assert made.warnings == ()
    if plan(sizes, None, prefix).minimum_bytes < full:
        below = plan(sizes, full - 1, prefix)
        assert below.pinned_layers < sizes.moe_layers
        assert below.slabs > 0


def test_a_budget_below_the_minimum_is_refused_with_number_flag_and_least() -> None:
    least = plan(LARGE, None, prefix=10, context=4096).minimum_bytes
    with pytest.raises(BudgetError, match="--device-memory") as refused:
        plan(LARGE, 8 * 2**30, prefix=10, context=4096)
    assert str(8 * 2**30) in str(refused.value)
    assert str(least) in str(refused.value)
    assert refused.value.exit_status == 4


def test_a_negative_budget_is_refused_too() -> None:
    with pytest.raises(BudgetError):
        plan(LARGE, -1)


def test_slabs_are_preferred_once_a_token_s_cycle_fits() -> None:
    made = plan(LARGE, 40 * 10**9, prefix=10, context=4096)
    assert made.pinned_layers == 10
    assert made.slabs >= made.cycle_slabs == 8 * 38
    assert made.warnings == ()


def test_a_cycle_that_fits_exactly_is_a_cycle_that_fits() -> None:
    base = plan(LARGE, None, prefix=4).minimum_bytes - 8 * LARGE.expert_bytes
    cycle = 8 * 44
    fits = plan(LARGE, base + cycle * LARGE.expert_bytes, prefix=4)
    one_less = plan(LARGE, base + cycle * LARGE.expert_bytes - 1, prefix=4)
    assert (fits.pinned_layers, fits.slabs) == (4, cycle)
    assert one_less.pinned_layers == 6  # 351 experts of room: two layers of 128, and 95 slabs


def test_layers_are_pinned_instead_when_the_cycle_does_not_fit() -> None:
    small = dataclasses.replace(LARGE, experts_per_layer=32)
    base = plan(small, None, prefix=4).minimum_bytes - 8 * small.expert_bytes
    made = plan(small, base + 200 * small.expert_bytes, prefix=4)
    # 200 experts of room: 4 layers of 32 can be pinned, and more than two layers' worth of slabs remain.
    assert (made.pinned_layers, made.slabs) == (4 + 5, 200 - 5 * 32)
    assert made.cycle_slabs > made.slabs
    assert "--device-memory" in made.warnings[0]


def test_host_memory_takes_copies_off_the_disk() -> None:
    made = plan(LARGE, 24 * 10**9, prefix=4, host=10 * LARGE.expert_bytes + 5)
    assert made.host["expert_copies"] == 10 * LARGE.expert_bytes
    assert made.disk["experts"] > 0


@pytest.mark.parametrize(("prefix", "host", "context"), [(-1, 0, 0), (49, 0, 0), (0, -1, 0), (0, 0, -1)])
def test_counts_that_make_no_sense_are_usage_errors(prefix: int, host: int, context: int) -> None:
    with pytest.raises(UsageError):
        plan(LARGE, None, prefix, context, host)


def test_json_has_the_promised_keys() -> None:
    found = plan(LARGE, None).to_json()
    assert {"minimum_bytes", "all_resident_bytes", "planned"} <= set(found["device"])
    assert {"device", "host", "disk", "pinned_layers", "slabs", "cycle_slabs", "warnings", "machine"} == set(found)


@given(models(), st.integers(0, 300_000), st.integers(0, 300_000), st.integers(0, 300_000), st.booleans())
def test_no_more_is_planned_than_the_machine_has(
    model: tuple[ModelBytes, int], extra: int, host: int, device_room: int, unified: bool
) -> None:
    sizes, prefix = model
    least = plan(sizes, None, prefix).minimum_bytes
    machine = Machine(device_room, device_room if unified else 70_000, unified)

    def made(budget: int | None) -> MemoryPlan:
        return plan_memory(
            sizes, device_budget_bytes=budget, host_budget_bytes=host, prefix_layers=prefix, context_tokens=0,
            machine=machine,
        )  # fmt: skip

    for budget in (least + extra, None):
        if device_room < least:
            with pytest.raises(BudgetError, match=f"at least {least} bytes"):
                made(budget)
            continue
        found = made(budget)
        copies = found.host["expert_copies"]
        assert found.planned_bytes + copies * unified <= device_room
        assert copies <= min(host, 70_000 if not unified else host)
        asked = found.all_resident_bytes if budget is None else budget
        assert any("cut to" in told for told in found.warnings) or found.budget_bytes == asked


def test_one_memory_is_one_budget() -> None:
    machine = Machine(20 * 10**9, 20 * 10**9, unified=True)
    found = plan_memory(
        LARGE, device_budget_bytes=16 * 10**9, host_budget_bytes=10 * 10**9, prefix_layers=4, context_tokens=100,
        machine=machine,
    )  # fmt: skip
    assert found.planned_bytes + found.host["expert_copies"] <= 20 * 10**9
    assert len([told for told in found.warnings if "cut to" in told]) == 1
