"""Every method goes through one matrix; the published one also through hand-worked cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vismmoe.compressors import COMPRESSORS, get_compressor
from vismmoe.compressors.affinity import AffinityCompressor, marginal_expansion
from vismmoe.errors import UsageError
from vismmoe.types import AheadDemand, VisualTokens

METHODS = sorted(COMPRESSORS)


def visual(total: int, seed: int = 0, experts: int = 16, prefix: int = 2) -> VisualTokens:
    random = torch.Generator().manual_seed(seed)
    return VisualTokens(
        saliency=torch.rand(total, generator=random),
        embeddings=torch.randn(total, 4, generator=random),
        positions=torch.arange(total) + 3,
        image_index=torch.zeros(total, dtype=torch.int64),
        grid=((1, total),),
        prefix_experts=torch.randint(experts, (prefix, total, 2), generator=random),
        prefix_weights=torch.rand(prefix, total, 2, generator=random),
        num_experts=experts,
        states=torch.randn(total, 4, generator=random) if prefix else None,
        prompt_states=torch.randn(3, 4, generator=random) if prefix else None,
        ahead=AheadDemand(
            torch.randint(experts, (2, total, 2), generator=random),
            torch.rand(2, experts, generator=random) < 0.3,
            torch.tensor([10, 30]),
        )
        if prefix
        else None,
    )


@pytest.mark.parametrize("method", METHODS)
@given(total=st.integers(0, 40), share=st.floats(0, 1), seed=st.integers(0, 5))
@settings(max_examples=25)
def test_exactly_the_asked_number_of_distinct_sorted_tokens_is_kept(
    method: str, total: int, share: float, seed: int
) -> None:
    count = int(share * total)
    kept = get_compressor(method).keep(visual(total, seed), count)
    assert kept.dtype == torch.int64
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == count
    assert all(0 <= index < total for index in kept.tolist())


@pytest.mark.parametrize("method", METHODS)
def test_the_same_tokens_give_the_same_choice(method: str) -> None:
    first, second = (get_compressor(method).keep(visual(30), 11) for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_keeping_more_than_there_is_is_a_mistake(method: str) -> None:
    with pytest.raises(ValueError, match="cannot keep 9 of 8"):
        get_compressor(method).keep(visual(8), 9)


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_without_layers_is_no_obstacle(method: str) -> None:
    assert len(get_compressor(method).keep(visual(8, prefix=0), 4)) == 4


def by_hand() -> VisualTokens:
    """Five tokens, one prefix layer, top-2. Core (alpha 0.2): token 0 with experts {0, 1}."""
    experts = torch.tensor([[[0, 1], [0, 1], [0, 2], [2, 3], [1, 0]]])
    return VisualTokens(
        saliency=torch.tensor([1.0, 0.1, 0.8, 0.9, 0.2]),
        embeddings=torch.zeros(5, 4),
        positions=torch.arange(5),
        image_index=torch.zeros(5, dtype=torch.int64),
        grid=((1, 5),),
        prefix_experts=experts,
        prefix_weights=torch.ones(1, 5, 2),
        num_experts=4,
    )


def test_marginal_expansion_is_the_share_of_a_tokens_experts_that_the_core_lacks() -> None:
    assert marginal_expansion(by_hand(), torch.tensor([0])).tolist() == [0.0, 0.0, 0.5, 1.0, 0.0]


def test_the_same_expert_in_another_layer_is_another_expert() -> None:
    tokens = by_hand()
    two = torch.cat((tokens.prefix_experts, torch.tensor([[[3, 2], [0, 1], [3, 2], [3, 2], [3, 2]]])))
    changed = VisualTokens(**{**vars(tokens), "prefix_experts": two})
    assert marginal_expansion(changed, torch.tensor([0])).tolist() == [0.0, 0.5, 0.25, 0.5, 0.0]


def test_affinity_prefers_tokens_that_ask_for_no_new_experts() -> None:
    # scores outside the core: 0.1, 0.8 - 2 * 0.5 = -0.2, 0.9 - 2 = -1.1, 0.2
    assert AffinityCompressor(salient_ratio=0.2, trade_off=2.0).keep(by_hand(), 3).tolist() == [0, 1, 4]


def test_without_trade_off_affinity_is_saliency() -> None:
    kept = AffinityCompressor(salient_ratio=0.2, trade_off=0.0).keep(by_hand(), 3)
    assert kept.tolist() == get_compressor("saliency").keep(by_hand(), 3).tolist() == [0, 2, 3]


def test_the_salient_core_is_kept_whatever_it_costs() -> None:
    assert AffinityCompressor(salient_ratio=0.6, trade_off=100.0).keep(by_hand(), 3).tolist() == [0, 2, 3]


def test_a_core_larger_than_what_is_kept_is_cut_by_saliency() -> None:
    assert AffinityCompressor(salient_ratio=1.0).keep(by_hand(), 2).tolist() == [0, 3]


def changed(**fields: object) -> VisualTokens:
    return VisualTokens(**{**vars(by_hand()), **fields})


def test_by_gate_mass_a_new_expert_that_carries_little_costs_little() -> None:
    # token 2 gives a tenth of its mass to the new expert 2: 0.8 - 2 * 0.1 = 0.6 beats token 4 with 0.2
    weights = torch.tensor([[[0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5], [0.5, 0.5]]])
    tokens = changed(prefix_weights=weights)
    assert get_compressor("affinity-mass").keep(tokens, 2).tolist() == [0, 2]
    assert get_compressor("affinity").keep(tokens, 2).tolist() == [0, 4]


def test_by_bytes_what_an_earlier_token_loads_is_free_for_later_ones() -> None:
    # core: 0 with {0, 1}; then 4 (0.2), 1 (0.1), then 2: 0.8 - 2 / 2, which makes 2 free for 3: 0.9 - 2 / 2
    saliency = torch.tensor([1.0, 0.1, 0.8, 0.7, 0.2])
    use = torch.tensor([[[0, 1], [0, 1], [0, 2], [2, 3], [2, 0]]])
    ahead = AheadDemand(use, torch.zeros(1, 4, dtype=torch.bool), torch.tensor([10]))
    # scores after the core: 1: 0.1; 2: 0.8 - 1 = -0.2; 3: 0.7 - 2; 4: 0.2 - 1 = -0.8. After 1 and 2: 4: 0.2; 3: -0.3
    tokens = changed(saliency=saliency, ahead=ahead)
    assert get_compressor("affinity-bytes").keep(tokens, 4).tolist() == [0, 1, 2, 4]


def test_what_the_question_asks_about_is_worth_as_much_as_what_stands_out() -> None:
    # alike to the nearest word, scaled: 3: 1; 1 and 2: (.707 - .555) / (1 - .555) = .34; 0 and 4: 0
    states = torch.tensor([[0.0, 1.0], [-1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [0.0, -1.0]]) + 3
    words = torch.tensor([[2.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    use = torch.zeros(1, 5, 1, dtype=torch.int64)  # all ask for the same expert: nothing is saved
    tokens = changed(
        saliency=torch.tensor([1.0, 0.5, 0.6, 0.4, 0.1]),
        states=states,
        prompt_states=words,
        ahead=AheadDemand(use, torch.zeros(1, 4, dtype=torch.bool), torch.tensor([1])),
    )
    assert get_compressor("affinity-bytes").keep(tokens, 2).tolist() == [0, 2]
    # worth: .50, .42, .47, .70, .05
    assert get_compressor("affinity-prompt").keep(tokens, 2).tolist() == [0, 3]
    assert get_compressor("affinity-prompt").keep(tokens, 3).tolist() == [0, 2, 3]


def test_layers_with_larger_experts_weigh_more() -> None:
    # layer A: token 1 asks for something new, layer B: token 2 does; experts of B are ten times as large
    use = torch.tensor([[[0], [1], [0], [1], [1]], [[0], [0], [1], [1], [1]]])
    ahead = AheadDemand(use, torch.zeros(2, 4, dtype=torch.bool), torch.tensor([1, 10]))
    tokens = changed(saliency=torch.tensor([1.0, 0.5, 0.5, 0.0, 0.0]), ahead=ahead)
    assert get_compressor("affinity-bytes").keep(tokens, 2).tolist() == [0, 1]


def test_what_is_resident_costs_nothing() -> None:
    use = torch.tensor([[[0], [1], [2], [3], [3]]])
    there = torch.tensor([[False, False, True, False]])
    tokens = changed(
        saliency=torch.tensor([1.0, 0.6, 0.5, 0.1, 0.0]), ahead=AheadDemand(use, there, torch.tensor([10]))
    )
    assert get_compressor("affinity-resident").keep(tokens, 2).tolist() == [0, 2]
    assert get_compressor("affinity-bytes").keep(tokens, 2).tolist() == [0, 1]


def test_diversity_leaves_out_what_repeats_a_token_that_is_taken() -> None:
    embeddings = torch.tensor([[4.0, 0.0], [4.0, 0.1], [-4.0, 4.0], [-4.0, -4.0]])
    tokens = changed(saliency=torch.tensor([1.0, 0.95, 0.5, 0.4, 0.0])[:4], embeddings=embeddings)
    assert get_compressor("diversity").keep(tokens, 2).tolist() == [0, 2]
    assert get_compressor("saliency").keep(tokens, 2).tolist() == [0, 1]


def test_prompt_prefers_tokens_like_a_word_of_the_question() -> None:
    states = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    words = torch.tensor([[0.0, 5.0], [0.0, -5.0]])
    tokens = changed(saliency=torch.full((5,), 0.5), states=states, prompt_states=words)
    assert get_compressor("prompt").keep(tokens, 2).tolist() == [1, 3]


def test_prompt_without_a_question_is_saliency() -> None:
    assert get_compressor("prompt").keep(by_hand(), 3).tolist() == [0, 2, 3]


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0.02, 1))
@settings(max_examples=50)
def test_downsampling_never_leaves_more_tokens_than_pruning_would(columns: int, rows: int, ratio: float) -> None:
    method = get_compressor("downsample")
    width, height = method.resize(columns * 16, rows * 16, ratio, 16)
    assert width % 16 == height % 16 == 0
    left = (width // 16) * (height // 16)
    assert 1 <= left <= max(1, get_compressor("uniform").count(columns * rows, ratio))
    assert method.count(left, ratio) == left  # nothing is dropped on top


def test_downsampling_keeps_the_shape_and_nearly_all_that_it_may() -> None:
    assert get_compressor("downsample").resize(256, 128, 0.5, 16) == (160, 96)  # 10 x 6 of 16 x 8
    assert get_compressor("downsample").resize(100, 60, 1.0, 16) == (100, 60)
    assert get_compressor("saliency").resize(256, 128, 0.5, 16) == (256, 128)


def test_uniform_takes_the_middle_of_even_stretches() -> None:
    assert get_compressor("uniform").keep(visual(12), 3).tolist() == [2, 6, 10]


def test_random_depends_on_the_picture_and_on_the_seed() -> None:
    choices = {tuple(get_compressor("random").keep(visual(40, seed), 10).tolist()) for seed in range(6)}
    assert len(choices) == 6
    assert get_compressor("random", seed=1).keep(visual(40), 10).tolist() not in [list(c) for c in choices]


def test_an_unknown_method_is_refused_and_the_nearest_is_named() -> None:
    with pytest.raises(UsageError, match="Did you mean 'affinity'"):
        get_compressor("afinity")


def test_options_reach_the_methods_that_have_them() -> None:
    assert get_compressor("affinity", salient_ratio=0.4, trade_off=1.0) == AffinityCompressor(0.4, 1.0)
    assert get_compressor("uniform", salient_ratio=0.4).name == "uniform"
