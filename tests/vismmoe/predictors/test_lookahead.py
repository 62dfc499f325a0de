"""The learned predictor: loss by hand, export, and the serving object."""

from __future__ import annotations

import math

import pytest
import torch

from vismmoe.errors import UsageError
from vismmoe.predictors import LookaheadNet, LookaheadPredictor, NextGate, PredictorConfig
from vismmoe.predictors.features import PredictorInputs, inputs_from_state
from vismmoe.predictors.guide import per_layer
from vismmoe.predictors.lookahead import lookahead_loss
from vismmoe.types import LayerState, ModelSpec

SPEC = ModelSpec("tiny", 4, (0, 1, 2, 3), num_experts=8, top_k=2, hidden_size=5, expert_width=4, fingerprint="f")
CONFIGS = {
    "guided": PredictorConfig(window=3, hidden_sizes=(6, 7), rank=4),
    "guided without token": PredictorConfig(window=3, hidden_sizes=(6, 7), use_token_state=False),
    "guided by the gate alone": PredictorConfig(
        window=3, hidden_sizes=(6, 7), use_history=False, use_retained_mean=False, use_layer=False, use_phase=False
    ),
    "guided without gate": PredictorConfig(window=3, hidden_sizes=(6, 7), use_next_gate=False),
    "published": PredictorConfig.published(window=3, hidden_sizes=(6, 7)),
    "published, a row a distance": PredictorConfig.published(window=3, hidden_sizes=(6, 7), head="per-distance"),
}


def inputs(rows: int) -> PredictorInputs:
    torch.manual_seed(1)
    return PredictorInputs(
        row=torch.arange(rows) % 4,
        decode=torch.arange(rows) % 2 == 0,
        token=torch.randn(rows, 5),
        retained_mean=torch.randn(rows, 5),
        visual_summary=torch.randn(rows, 5),
        recent=torch.rand(rows, 8),
        ahead=torch.rand(rows, 3, 8),
        next_gate=torch.rand(rows, 3, 8).softmax(-1),
    )


def trained(name: str) -> LookaheadNet:
    """Every parameter and running statistic away from where it starts."""
    torch.manual_seed(2)
    net = LookaheadNet(CONFIGS[name], SPEC)
    net.standardise(inputs(40))
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    for _ in range(3):
        net(inputs(40))
    return net.eval()


def test_one_row_a_distance_weighs_each_row_by_gamma() -> None:
    logits = torch.zeros(1, 2, 2)
    logits[0, 0] = torch.tensor([2.0, -2.0])
    active = torch.tensor([[[True, False], [True, True]]])
    near, far = math.log(1 + math.exp(-2)), math.log(2)
    loss = lookahead_loss(logits, active, torch.ones(1, 2, dtype=torch.bool), gamma=0.5)
    assert loss.item() == pytest.approx((near + 0.5 * far) / 1.5, rel=1e-5)


def test_one_row_for_all_distances_has_the_nearest_use_as_its_soft_target() -> None:
    active = torch.tensor([[[True, False, False], [True, True, False]]])  # targets: 1, gamma, 0
    logits = torch.tensor([[[0.0, 1.0, -1.0]]])
    loss = lookahead_loss(logits, active, torch.ones(1, 2, dtype=torch.bool), gamma=0.8)
    soft = -(0.8 * math.log(1 / (1 + math.exp(-1))) + 0.2 * math.log(1 - 1 / (1 + math.exp(-1))))
    assert loss.item() == pytest.approx((math.log(2) + soft + math.log(1 + math.exp(-1))) / 3, rel=1e-5)


def test_layers_past_the_last_one_do_not_count() -> None:
    active = torch.zeros(1, 2, 4, dtype=torch.bool)
    logits = torch.zeros(1, 2, 4)
    wild = logits.clone()
    wild[0, 1] = 50.0
    exists = torch.tensor([[True, False]])
    assert lookahead_loss(logits, active, exists, 0.8) == lookahead_loss(wild, active, exists, 0.8)


def test_rows_go_through_their_own_layers_matrices_whatever_their_order() -> None:
    row, x, w = torch.tensor([2, 0, 2, 1]), torch.randn(4, 3), torch.randn(3, 3, 5)
    expected = torch.stack([x[i] @ w[row[i]] for i in range(4)])
    torch.testing.assert_close(per_layer(row, x, w), expected)
    torch.testing.assert_close(per_layer(row[:1], x[:1], w), expected[:1])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_exported_form_scores_as_the_trained_one(name: str) -> None:
    net, folded = trained(name), exported(name)
    assert not any(word in key for key in folded.state_dict() for word in ("running", "mean", "input"))
    torch.testing.assert_close(folded(inputs(9)), net(inputs(9)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_call_scores_as_its_row_in_a_batch(name: str) -> None:
    net, many = trained(name), inputs(6)
    for index in range(6):
        one = PredictorInputs(**{key: value[index : index + 1] for key, value in vars(many).items()})
        torch.testing.assert_close(net(one)[0], net(many)[index], rtol=1e-4, atol=1e-5)


def test_the_guided_network_starts_with_the_ranking_of_next_gate() -> None:
    net = LookaheadNet(CONFIGS["guided"], SPEC).eval()
    told = inputs(8)
    told = PredictorInputs(**{**vars(told), "ahead": torch.zeros_like(told.ahead)})
    assert net(told).argsort(-1).tolist() == told.next_gate.argsort(-1).tolist()


def state(layer: int, phase: str = "decode", tokens: int = 1) -> LayerState:
    torch.manual_seed(layer)
    return LayerState(layer, phase, torch.randn(tokens, 5), torch.randn(5), torch.randn(5), torch.rand(4, 8))  # type: ignore[arg-type]


def exported(name: str) -> LookaheadNet:
    net = trained(name)
    folded = LookaheadNet(net.config, SPEC, folded=True)
    folded.load_state_dict(net.folded_weights())
    return folded


def predictor(name: str) -> LookaheadPredictor:
    routers = {layer: torch.randn(8, 5, generator=torch.Generator().manual_seed(layer)) for layer in SPEC.moe_layers}
    return LookaheadPredictor(exported(name), SPEC, NextGate(SPEC, routers))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_the_short_way_of_a_decoded_token_scores_as_the_network(name: str, layer: int) -> None:
    serving, asked = predictor(name), state(layer)
    gate = serving._gate
    assert gate is not None
    masses = gate.masses(layer, asked.hidden, 3) if serving._net.config.use_next_gate else torch.zeros(3, 8)
    long_way = serving._net(inputs_from_state(asked, layer, masses))[0].sigmoid().expand(3, -1)
    ahead = min(3, 3 - layer)
    torch.testing.assert_close(serving.predict(asked)[:ahead], long_way[:ahead], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_probabilities_and_zero_past_the_last_layer(name: str) -> None:
    serving = predictor(name)
    for layer, rows in ((0, 3), (2, 1), (3, 0)):
        scores = serving.predict(state(layer))
        assert scores.shape == (3, 8)
        assert scores.dtype == torch.float32
        assert (scores[:rows] > 0).all()
        assert (scores[:rows] < 1).all()
        assert scores[rows:].abs().sum() == 0


def test_a_single_head_names_the_same_experts_for_every_distance() -> None:
    scores = predictor("published").predict(state(0))
    assert torch.equal(scores[0], scores[2])


def test_a_prefill_of_many_tokens_is_scored_too() -> None:
    assert predictor("guided").predict(state(0, "prefill", tokens=7)).shape == (3, 8)


def test_a_narrow_token_state_is_read_through_its_main_directions() -> None:
    """States that truly vary in three directions only are scored as by the whole network."""
    torch.manual_seed(5)
    config = PredictorConfig(window=3, hidden_sizes=(6, 7), rank=4, token_rank=3)
    told = inputs(40)
    told = PredictorInputs(**{**vars(told), "token": torch.randn(40, 3) @ torch.randn(3, 5) + torch.randn(5)})
    net = LookaheadNet(config, SPEC)
    net.standardise(told)
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    folded = LookaheadNet(config, SPEC, folded=True)
    folded.load_state_dict(net.eval().folded_weights())
    routers = {layer: torch.randn(8, 5) for layer in SPEC.moe_layers}
    serving = LookaheadPredictor(folded, SPEC, NextGate(SPEC, routers))
    for layer in (0, 1, 2):
        seen = state(layer)
        seen = LayerState(**{**vars(seen), "hidden": told.token[told.row == layer][:1]})
        gate = serving._gate
        assert gate is not None
        long_way = folded(inputs_from_state(seen, layer, gate.masses(layer, seen.hidden, 3)))[0].sigmoid()
        ahead = 3 - layer
        torch.testing.assert_close(serving.predict(seen)[:ahead], long_way[:ahead], rtol=1e-3, atol=1e-4)


def test_the_static_part_follows_the_request() -> None:
    serving = predictor("guided")
    first, other = state(1), state(1)
    other = LayerState(**{**vars(other), "retained_mean": other.retained_mean + 3.0})
    before = serving.predict(first)
    assert not torch.equal(serving.predict(other), before)
    assert torch.equal(serving.predict(first), before)


def test_scores_carry_no_gradient() -> None:
    assert not predictor("guided").predict(state(1)).requires_grad


def test_a_predictor_that_needs_the_routers_says_so() -> None:
    unbound = LookaheadPredictor(exported("guided"), SPEC)
    assert unbound.needs_gate
    with pytest.raises(RuntimeError, match="bind"):
        unbound.predict(state(0))
    assert not LookaheadPredictor(exported("published"), SPEC).needs_gate


def test_a_network_in_training_form_cannot_serve() -> None:
    with pytest.raises(ValueError, match="exported"):
        LookaheadPredictor(trained("published"), SPEC)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"window": 0}, "window"), ({"gamma": 0.0}, "gamma"), ({"dropout": 1.0}, "dropout"), ({"head": "single"}, "head")],
)
def test_settings_that_make_no_sense_are_refused_by_name(change: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        PredictorConfig(**change)  # type: ignore[arg-type]


def test_settings_survive_json_and_nothing_else_is_read() -> None:
    config = CONFIGS["published"]
    assert PredictorConfig.from_json(config.to_json()) == config
    for damage in ({"window": "5"}, {"hidden_sizes": [1.5, 2]}, {"use_layer": 1}, {"extra": 1}):
        with pytest.raises(UsageError):
            PredictorConfig.from_json({**config.to_json(), **damage})
