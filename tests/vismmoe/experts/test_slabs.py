from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vismmoe.experts.places import slack_bytes
from vismmoe.experts.slabs import SlabPool


@pytest.mark.parametrize("count", [0, 1, 5])
def test_slabs_are_as_many_and_as_long_as_asked(make_masters: Callable[..., Any], count: int) -> None:
    layout = make_masters().layout
    pool = SlabPool(count, layout)
    for slot in range(count):
        assert pool.bytes(slot).shape == (layout.expert_bytes,)
        assert pool.buffer(slot).nbytes == layout.expert_bytes
    with pytest.raises(IndexError):
        pool.bytes(count)


def test_writing_one_slab_leaves_its_neighbours_alone(make_masters: Callable[..., Any]) -> None:
    pool = SlabPool(3, make_masters(rows=25).layout)  # 25 rows: the expert does not end on a cache line
    for slot in range(3):
        pool.buffer(slot)[:] = bytes([slot + 1]) * pool.expert_bytes
    for slot in range(3):
        assert torch.equal(pool.bytes(slot), torch.full((pool.expert_bytes,), slot + 1, dtype=torch.uint8))


def test_weights_are_the_slab_s_own_memory_in_in_memory_orientation(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(dtype=torch.float32)
    pool = SlabPool(2, masters.layout)
    weights = pool.weights(1)
    assert weights["gate_up_proj"].shape == (16, 24)
    assert weights["down_proj"].shape == (8, 24)
    on_disk = torch.arange(24 * 16 + 8 * 24, dtype=torch.float32)
    pool.bytes(1).copy_(on_disk.view(torch.uint8))
    assert torch.equal(weights["gate_up_proj"], on_disk[: 24 * 16].view(24, 16).T)
    assert torch.equal(weights["down_proj"], on_disk[24 * 16 :].view(8, 24))
    assert pool.weights(1) is weights


def test_all_slabs_give_weights_of_the_same_strides_and_alignment(make_masters: Callable[..., Any]) -> None:
    pools = [SlabPool(3, make_masters(rows=25).layout) for _ in range(2)]
    views = [pool.weights(slot) for pool in pools for slot in range(3)]
    for name in views[0]:
        assert len({(view[name].stride(), view[name].data_ptr() % 64) for view in views}) == 1
    assert all(pool.bytes(0).data_ptr() % 4096 == 0 for pool in pools)


def test_an_expert_has_one_alignment_in_every_pool_in_host_memory(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=1, experts=3, rows=5555, lead=1234)
    pools = [SlabPool(2, masters.layout) for _ in range(2)]
    for expert, ranges in masters.layout.ranges.items():
        for place, name in enumerate(("gate_up_proj", "down_proj")):
            starts = {pool.weights(slot, expert)[name].data_ptr() % 4096 for pool in pools for slot in range(2)}
            assert starts == {ranges[place].offset % 4096}


def test_weights_follow_the_expert_that_a_slab_holds(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=1, experts=2, rows=5555, lead=1234)
    pool, (first, second) = SlabPool(1, masters.layout), masters.layout.ranges
    for expert in (first, second, first):
        weights = pool.weights(0, expert)
        assert pool.weights(0, expert) is weights
        for held, part in zip(weights.values(), pool.parts(0, expert), strict=True):
            assert held.data_ptr() == part.data_ptr()


@pytest.mark.parametrize("rows", [24, 25, 5555])
@pytest.mark.parametrize("packed", [True, False])
def test_the_plan_counts_what_a_slab_takes(make_masters: Callable[..., Any], rows: int, packed: bool) -> None:
    layout = make_masters(layers=1, rows=rows).layout
    pool = SlabPool(3, layout, packed=packed)
    each = layout.expert_bytes + slack_bytes(layout, packed)
    assert pool.bytes(2).data_ptr() - pool.bytes(1).data_ptr() == each
    assert each - layout.expert_bytes < (64 if packed or rows < 5555 else 2 * 2 * 4096)


def test_experts_move_between_pools_with_and_without_room(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=1, experts=2, rows=5555, lead=1234)
    roomy, packed = SlabPool(1, masters.layout), SlabPool(2, masters.layout, packed=True)
    for slot, expert in enumerate(masters.layout.ranges):
        for part in roomy.parts(0, expert):
            part.random_()
        packed.take(slot, roomy, 0, expert)
        assert torch.equal(packed.bytes(slot), torch.cat(roomy.parts(0, expert)))
        for name, weight in packed.weights(slot, expert).items():
            assert torch.equal(weight.view(torch.int16), roomy.weights(0, expert)[name].view(torch.int16))
