"""What a prefill leaves behind for decode: experts of text tokens, not of pictures."""

from __future__ import annotations

import torch

from vismmoe.experts.cache import ExpertCache
from vismmoe.working_set import rooms, working_set


def test_the_last_token_comes_first_then_text_then_pictures() -> None:
    #                       picture          picture  text    text    last
    chosen = torch.tensor([[7, 6], [7, 5], [3, 2], [3, 1], [0, 1]])
    found = working_set(chosen, torch.tensor([0, 1]), limit=8)
    assert set(found[:2]) == {0, 1}
    assert found[2:4] == [3, 2]
    assert found[4] == 7
    assert set(found[5:]) == {5, 6}
    assert working_set(chosen, torch.tensor([0, 1]), limit=3) == found[:3]


def test_any_number_of_visual_tokens_counts_less_than_one_word() -> None:
    chosen = torch.tensor([[0, 1]] * 500 + [[2, 3]] + [[4, 5]])
    assert set(working_set(chosen, torch.arange(500), limit=4)) == {2, 3, 4, 5}


def test_what_was_never_chosen_does_not_last() -> None:
    assert set(working_set(torch.tensor([[4, 9]]), torch.zeros(0, dtype=torch.int64), limit=5)) == {4, 9}


def test_the_working_set_leaves_room_for_what_passes_through_and_most_to_the_layer_that_nobody_foresees() -> None:
    cache = ExpertCache(154, reserve=8)
    found = rooms(cache, (3, 4, 5, 6), top_k=8)
    assert sum(found.values()) + cache.passage <= 154
    assert found[3] == 2 * found[4] == 2 * found[6]
    assert rooms(ExpertCache(9, reserve=8), (0, 1), top_k=8) == {0: 8, 1: 8}
    assert rooms(ExpertCache(0, reserve=8), (), top_k=8) == {}
