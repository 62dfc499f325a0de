"""Histories and inputs by hand."""

from __future__ import annotations

import torch

from vismmoe.predictors.features import (
    HISTORY_DECAY,
    PredictorInputs,
    advance_history,
    feature_count,
    gate_evidence,
    inputs_from_state,
    recent_histogram,
    rows_ahead,
    trunk_features,
)
from vismmoe.predictors.options import PredictorConfig
from vismmoe.types import LayerState


def test_decode_adds_one_for_each_chosen_expert() -> None:
    row = advance_history(torch.tensor([0.0, 1.0, 0.5, 0.0]), torch.tensor([1, 1, 0, 0]), top_k=2)
    assert row.tolist() == [1.0, 1.5, 0.25, 0.0]


def test_prefill_adds_the_share_of_tokens_that_chose_each_expert() -> None:
    row = advance_history(torch.zeros(4), torch.tensor([4, 3, 1, 0]), top_k=2)  # 8 choices, so 4 tokens
    assert row.tolist() == [1.0, 0.75, 0.25, 0.0]


def test_an_empty_forward_only_fades_the_history() -> None:
    assert advance_history(torch.ones(3), torch.zeros(3, dtype=torch.int32), 2).tolist() == [HISTORY_DECAY] * 3


def test_the_last_step_outranks_everything_older() -> None:
    row = torch.zeros(2)
    for chosen in ([0, 1], [0, 1], [0, 1], [0, 1], [1, 0]):
        row = advance_history(row, torch.tensor(chosen), top_k=1)
    assert row[0] > row[1]


def test_recent_histogram_is_the_mean_of_the_window_behind() -> None:
    history = torch.arange(5.0).unsqueeze(1).expand(5, 3)
    assert recent_histogram(history, 3, 2).tolist() == [2.5, 2.5, 2.5]
    assert recent_histogram(history, 0, 4).tolist() == [0.0, 0.0, 0.0]


def test_rows_past_the_last_layer_are_zeros() -> None:
    history = torch.arange(1.0, 5.0).unsqueeze(1)
    assert rows_ahead(history, 1, 3).flatten().tolist() == [3.0, 4.0, 0.0]
    assert rows_ahead(history, 3, 2).flatten().tolist() == [0.0, 0.0]


def test_gate_evidence_is_zero_for_an_even_share_and_for_a_missing_layer() -> None:
    gates = torch.tensor([[0.25] * 4, [0.0] * 4, [8.0, 0.0, 0.0, 0.0]])
    evidence = gate_evidence(gates, torch.tensor([True, False, True]))
    assert evidence[0].tolist() == [0.0] * 4
    assert evidence[1].tolist() == [0.0] * 4
    assert evidence[2, 0] > 1 > 0 > evidence[2, 1]


def test_in_a_prefill_experts_that_no_token_chose_are_all_alike() -> None:
    gate = torch.tensor([[10.0, 1e-6, 1e-9]])
    assert gate_evidence(gate, torch.tensor([True])).diff().abs().min() > 5
    assert gate_evidence(gate, torch.tensor([False]))[0].diff()[1].abs() < 1e-3


def inputs() -> PredictorInputs:
    state = LayerState(
        layer=4,
        phase="decode",
        hidden=torch.tensor([[9.0, 9.0], [1.0, 2.0]]),
        retained_mean=torch.tensor([3.0, 4.0]),
        visual_summary=torch.tensor([5.0, 6.0]),
        history=torch.eye(3),
    )
    return inputs_from_state(state, 1, torch.ones(2, 3))


def test_the_published_vector_is_histogram_then_pooled_tokens_then_summary() -> None:
    config = PredictorConfig.published(window=2)
    x = trunk_features(inputs(), config, num_layers=3)
    assert x.tolist() == [[0.5, 0.5, 0.0, 3.0, 4.0, 5.0, 6.0]]


def test_our_vector_adds_the_last_token_the_layer_and_the_phase() -> None:
    x = trunk_features(inputs(), PredictorConfig(window=2), num_layers=3)
    assert x[0, 7:].tolist() == [1.0, 2.0, 0.0, 1.0, 0.0, 1.0]


def test_the_width_of_the_vector_is_known_in_advance() -> None:
    for config in (PredictorConfig.published(window=2), PredictorConfig(window=2, use_visual_summary=False)):
        assert trunk_features(inputs(), config, 3).shape[1] == feature_count(config, 3, 3, 2)
