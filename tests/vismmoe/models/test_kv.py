"""The cache that is allocated once holds what transformers' own holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeConfig
from transformers.cache_utils import DynamicCache

from vismmoe.models.kv import allocated_cache

LAYERS = 2


@pytest.fixture
def config() -> Any:
    return Qwen3VLMoeConfig(text_config={"num_hidden_layers": LAYERS, "rope_parameters": {"rope_type": "default"}})


def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, tokens, 4), torch.randn(1, 2, tokens, 4)


def test_it_holds_what_a_growing_cache_holds_in_one_place(config: Any) -> None:
    ours, theirs = allocated_cache(config, 5), DynamicCache(config=config)
    places: set[int] = set()
    for tokens in (7, 1, 1, 1):
        for layer in range(LAYERS):
            keys, values = states(tokens)
            told, wanted = ours.update(keys, values, layer), theirs.update(keys.clone(), values.clone(), layer)
            assert all(map(torch.equal, told, wanted))
            places.add(told[0].data_ptr())
        assert ours.get_seq_length() == theirs.get_seq_length()
    assert len(places) == LAYERS


def test_layers_of_another_length_have_room_of_their_own(config: Any) -> None:
    cache = allocated_cache(config, 3)
    for layer, tokens in enumerate((9, 4)):  # the deeper one sees a compressed prompt
        cache.update(*states(tokens), layer)
    assert [layer.keys.shape[-2] for layer in cache.layers] == [9, 4]
    assert [layer._room[0].shape[-2] for layer in cache.layers] == [12, 7]


def test_an_answer_longer_than_said_and_a_cropped_cache_still_work(config: Any) -> None:
    ours, theirs = allocated_cache(config, 2), DynamicCache(config=config)
    for tokens in (3, 1, 1, 1, 1):
        keys, values = states(tokens)
        assert all(map(torch.equal, ours.update(keys, values, 0), theirs.update(keys, values, 0)))
    for cache in (ours, theirs):
        cache.layers[0].crop(-4)
    keys, values = states(1)
    assert all(map(torch.equal, ours.update(keys, values, 0), theirs.update(keys, values, 0)))
    for cache in (ours, theirs):
        cache.reset()
    assert ours.get_seq_length() == 0
    keys, values = states(2)
    assert torch.equal(ours.update(keys, values, 0)[0], keys)
