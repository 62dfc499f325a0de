"""Our sum over experts has the bits of transformers' eager loop, whatever the order of arrival."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from vismmoe.models.arithmetic import LayerSum, read_demand

EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 32, 24


@pytest.fixture(scope="module")
def make_experts() -> Any:
    """make(width): experts of that inner width, in transformers' own eager implementation."""
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

    def make(width: int) -> Any:
        config = Qwen3VLMoeTextConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=width)
        config._experts_implementation = "eager"
        module = Qwen3VLMoeTextExperts(config)
        torch.manual_seed(0)
        for value in module.parameters():
            torch.nn.init.normal_(value)
        return module.requires_grad_(False)

    return make


@pytest.fixture(scope="module")
def experts(make_experts: Any) -> Any:
    return make_experts(WIDTH)


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weights, index = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return hidden, index, weights


def weights_of(experts: Any, expert: int) -> dict[str, torch.Tensor]:
    return {"gate_up_proj": experts.gate_up_proj[expert], "down_proj": experts.down_proj[expert]}


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_any_order_of_arrival_gives_the_same_bits_and_the_sum_of_the_eager_loop(experts: Any, tokens: int) -> None:
    hidden, index, weights = routed(tokens)
    wanted = experts(hidden, index, weights)
    demand = read_demand(index)
    order, totals = list(demand.experts), []
    for seed in range(5):
        random.Random(seed).shuffle(order)
        work = LayerSum(experts, hidden, weights, demand)
        for expert in order:
            work.run({expert: weights_of(experts, expert)})
        totals.append(work.total())
    assert all(torch.equal(total, totals[0]) for total in totals)
    # The very bits of transformers are those of most processors, not of all: some products depend on where rows lie.
    torch.testing.assert_close(totals[0], wanted, rtol=1e-4, atol=1e-4)


def test_demand_lists_distinct_experts_and_their_tokens() -> None:
    demand = read_demand(torch.tensor([[5, 2], [2, 9], [9, 0]]))
    assert demand.experts == (0, 2, 5, 9)
    assert demand.counts == (1, 2, 1, 2)
    assert [pairs.tolist() for pairs in demand.pairs] == [[5], [1, 2], [0], [3, 4]]
    assert demand.ascending.tolist() == [[1, 0], [2, 3], [5, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 24, 72, 192])
def test_the_bits_of_an_expert_do_not_depend_on_its_company(make_experts: Any, dtype: torch.dtype, width: int) -> None:
    experts = make_experts(width).to(dtype)
    hidden, index, weights = (each.to(dtype) if each.is_floating_point() else each for each in routed(1))
    demand = read_demand(index)
    found = []
    for sizes in ((1, 1, 1, 1), (4,), (1, 3), (2, 2)):
        work, left = LayerSum(experts, hidden, weights, demand), list(reversed(demand.experts))
        for size in sizes:
            work.run({left.pop(): weights_of(experts, expert) for expert in reversed(left[-size:])})
        found.append(work.total())
    assert all(torch.equal(each, found[0]) for each in found)
    if dtype is torch.float32:
        assert torch.equal(found[0], experts(hidden, index, weights))


def test_weights_of_another_number_format_are_converted_one_at_a_time(make_experts: Any) -> None:
    experts = make_experts(64)
    hidden, index, weights = routed(1)
    wanted = experts.bfloat16().float()(hidden, index, weights)
    demand = read_demand(index)
    work = LayerSum(experts, hidden, weights, demand)
    held = {expert: weights_of(experts, expert) for expert in demand.experts}
    work.run({expert: {name: weight.bfloat16() for name, weight in parts.items()} for expert, parts in held.items()})
    assert torch.equal(work.total(), wanted)


def test_a_token_that_chose_an_expert_twice_gets_it_twice(make_experts: Any) -> None:
    experts = make_experts(64)
    hidden, index, weights = routed(1)
    index = index.clone()
    index[0, 1] = index[0, 3]
    demand = read_demand(index)
    assert len(demand.experts) == TOP_K - 1
    work = LayerSum(experts, hidden, weights, demand)
    work.run({expert: weights_of(experts, expert) for expert in demand.experts})
    torch.testing.assert_close(work.total(), experts(hidden, index, weights), rtol=1e-4, atol=1e-4)
