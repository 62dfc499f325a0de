"""The rules that learn nothing."""

from __future__ import annotations

import torch

from vismmoe.predictors import Chance, Frequency, NextGate, Previous
from vismmoe.predictors.next_gate import gate_mass
from vismmoe.types import LayerState, ModelSpec

SPEC = ModelSpec("tiny", 4, (1, 2, 3), num_experts=8, top_k=2, hidden_size=5, expert_width=4, fingerprint="f")
RANDOM = torch.Generator().manual_seed(0)
ROUTERS = {layer: torch.randn(8, 5, generator=RANDOM) for layer in SPEC.moe_layers}
NORMS = {layer: torch.rand(5, generator=RANDOM) + 0.5 for layer in SPEC.moe_layers}


def state(layer: int, tokens: int = 1) -> LayerState:
    hidden = torch.randn(tokens, 5, generator=torch.Generator().manual_seed(layer))
    history = torch.zeros(3, 8)
    history[1, 4], history[2, 6] = 1.0, 0.5
    return LayerState(layer, "decode" if tokens == 1 else "prefill", hidden, torch.zeros(5), torch.zeros(5), history)


def test_next_gate_at_distance_zero_ranks_all_experts_as_the_router_does() -> None:
    for layer in SPEC.moe_layers:
        hidden = state(layer).hidden
        router = (hidden @ ROUTERS[layer].T).softmax(-1)[0]
        here = NextGate(SPEC, ROUTERS, NORMS).here(layer, hidden)
        torch.testing.assert_close(here, router)
        assert here.argsort().tolist() == router.argsort().tolist()


def test_next_gate_corrects_for_the_norm_weights() -> None:
    hidden = state(1).hidden
    unscaled = hidden / NORMS[1]
    expected = torch.stack([((unscaled * NORMS[d]) @ ROUTERS[d].T).softmax(-1)[0] for d in (2, 3)])
    torch.testing.assert_close(NextGate(SPEC, ROUTERS, NORMS, window=2).masses(1, hidden), expected)


def test_next_gate_without_norms_asks_the_later_router_directly() -> None:
    hidden = state(2).hidden
    expected = (hidden @ ROUTERS[3].T).softmax(-1)[0]
    torch.testing.assert_close(NextGate(SPEC, ROUTERS, window=1).predict(state(2))[0], expected)


def test_many_tokens_are_ranked_by_the_mass_within_each_tokens_top_k() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.05, 0.5, 0.05, 0.4]])
    mass = gate_mass(shares.log(), top_k=2)
    torch.testing.assert_close(mass, torch.tensor([0.5, 0.8, 0.0, 0.4]), atol=1e-5, rtol=0)
    assert mass[2] > 0  # soft mass breaks ties among what no token chose


def test_next_gate_of_a_prefill_finds_exactly_what_its_own_router_activates() -> None:
    hidden = state(2, tokens=6).hidden
    chosen = set((hidden @ ROUTERS[2].T).topk(2, dim=-1).indices.flatten().tolist())
    best = NextGate(SPEC, ROUTERS, NORMS).here(2, hidden).topk(len(chosen)).indices.tolist()
    assert set(best) == chosen


def test_no_rule_scores_layers_past_the_last_one() -> None:
    for rule in (NextGate(SPEC, ROUTERS), Frequency(SPEC, torch.ones(2, 3, 8)), Previous(SPEC)):
        scores = rule.predict(state(2))
        assert scores.shape == (5, 8)
        assert scores[1:].abs().sum() == 0


def test_previous_token_names_what_the_later_layer_used_last() -> None:
    scores = Previous(SPEC, window=2).predict(state(1))
    assert scores.argmax(-1).tolist() == [4, 6]


def test_frequency_keeps_prefill_and_decode_apart() -> None:
    table = torch.zeros(2, 3, 8)
    table[0, 2, 1] = table[1, 2, 7] = 5.0
    rule = Frequency(SPEC, table, window=1)
    assert rule.predict(state(2)).argmax() == 7
    assert rule.predict(state(2, tokens=3)).argmax() == 1


def test_chance_repeats_with_its_seed_and_changes_from_call_to_call() -> None:
    one, other = Chance(SPEC, seed=3), Chance(SPEC, seed=3)
    first = one.predict(state(1))
    assert torch.equal(first, other.predict(state(1)))
    assert not torch.equal(first, one.predict(state(1)))
