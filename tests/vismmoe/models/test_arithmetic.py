"""Our sum over experts has the bits of transformers' eager loop, whatever the order of arrival."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from vismmoe.models.arithmetic import LayerSum, read_demand

EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 32, 24


@pytest.fixture(scope="module")
def experts() -> Any:
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

    config = Qwen3VLMoeTextConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=WIDTH)
    config._experts_implementation = "eager"
    module = Qwen3VLMoeTextExperts(config)
    torch.manual_seed(0)
    for value in module.parameters():
        torch.nn.init.normal_(value)
    return module


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weights, index = torch.randn(tokens, EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return hidden, index, weights


@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_any_order_of_arrival_gives_the_bits_of_the_eager_loop(experts: Any, tokens: int) -> None:
    hidden, index, weights = routed(tokens)
    wanted = experts(hidden, index, weights)
    demand = read_demand(index)
    order = list(demand.experts)
    for seed in range(5):
        random.Random(seed).shuffle(order)
        work = LayerSum(experts, hidden, weights, demand)
        for expert in order:
            work.run(expert, {"gate_up_proj": experts.gate_up_proj[expert], "down_proj": experts.down_proj[expert]})
        assert torch.equal(work.total(), wanted)


def test_demand_lists_distinct_experts_and_their_tokens() -> None:
    demand = read_demand(torch.tensor([[5, 2], [2, 9], [9, 0]]))
    assert demand.experts == (0, 2, 5, 9)
    assert demand.counts == (1, 2, 1, 2)
    assert [pairs.tolist() for pairs in demand.pairs] == [[5], [1, 2], [0], [3, 4]]
    assert demand.ascending.tolist() == [[1, 0], [2, 3], [5, 4]]
