from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vismmoe.bench.replay import Replay, ReplayedPredictor, respread, spread
from vismmoe.types import LayerState


@given(st.data())
def test_a_spread_gives_each_expert_its_tokens_and_no_token_an_expert_twice(data: st.DataObject) -> None:
    experts, top_k = data.draw(st.integers(4, 12)), data.draw(st.integers(1, 4))
    logged, tokens = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    dice = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    choices = torch.stack([torch.randperm(experts, generator=dice)[:top_k] for _ in range(logged)])
    counts = torch.bincount(choices.flatten(), minlength=experts)
    found = spread(counts, tokens, top_k)
    assert found.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in found.tolist())
    if tokens == logged:
        assert torch.equal(torch.bincount(found.flatten(), minlength=experts), counts)
    elif tokens > logged:
        assert set(found.flatten().tolist()) == set(choices.flatten().tolist())


def replay() -> Replay:
    """Two layers of four experts, a prefill and two decoded tokens with two choices each."""
    return Replay(
        prefill=torch.tensor([[[0, 1], [0, 2]], [[1, 3], [3, 1]]]),
        experts=torch.tensor([[[0, 3], [1, 2]], [[0, 1], [2, 3]]]),
        weights=torch.full((2, 2, 2), 0.5),
        scores={"predictor": torch.rand(3, 2, 1, 4)},
    )


def test_visits_come_in_the_order_in_which_layers_run() -> None:
    assert replay().visits() == [
        [(0, 0), (0, 1), (0, 2)], [(1, 1), (1, 3)],
        [(0, 0), (0, 3)], [(1, 1), (1, 2)],
        [(0, 0), (0, 1)], [(1, 2), (1, 3)],
    ]  # fmt: skip


def test_a_replay_survives_its_file(tmp_path: Path) -> None:
    replay().save(tmp_path / "replay.safetensors")
    again = Replay.load(tmp_path / "replay.safetensors")
    assert again.steps == 3
    assert again.visits() == replay().visits()
    assert set(again.scores) == {"predictor"}


def test_a_prefill_of_as_many_tokens_is_replayed_token_by_token() -> None:
    chosen = replay().prefill[0]
    assert torch.equal(respread(chosen, 2, 2, experts=4), chosen)
    assert sorted(respread(chosen, 4, 2, experts=4).flatten().tolist()) == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("step", "layer"), [(0, 5), (2, 9)])
def test_the_replayed_predictor_says_what_was_logged_at_this_place(step: int, layer: int) -> None:
    scores = replay().scores["predictor"]
    predictor = ReplayedPredictor("predictor", scores, (5, 9))
    predictor.step = step
    nothing = torch.zeros(1)
    state = LayerState(layer, "decode", nothing, nothing, nothing, nothing)
    assert torch.equal(predictor.predict(state), scores[step, (5, 9).index(layer)])
