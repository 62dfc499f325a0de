"""Rows see what serving sees, targets are what then happened, images stay on one side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vismmoe.errors import CorpusError
from vismmoe.metrics import hot_recall
from vismmoe.predictors.features import advance_history, inputs_from_state
from vismmoe.trace import read_traces
from vismmoe.types import LayerState
from vismmoe_training.data import EpochBatches, LookaheadData, split_items
from vismmoe_training.row_table import RowTable

WriteLogs = Callable[..., Path]


@pytest.fixture
def table(write_logs: WriteLogs) -> RowTable:
    return RowTable(read_traces([write_logs(items=6)]), window=3)


def test_a_row_has_exactly_the_inputs_that_serving_would_build(write_logs: WriteLogs) -> None:
    """Replays a request as the engine does, layer by layer, and compares every input of every row."""
    traces = read_traces([write_logs(items=2)])
    table, spec = RowTable(traces, 3), traces.header.spec
    for request in (0, 1):
        history = torch.zeros(len(spec.moe_layers), spec.num_experts)
        means: dict[int, torch.Tensor] = {}
        for place in (traces.request == request).nonzero().flatten().tolist():
            row = int(traces.layer[place])
            history[row] = advance_history(history[row], traces.counts[place], spec.top_k)
            means.setdefault(row, traces.retained_mean[traces.retained_row[place]].float())
            state = LayerState(
                layer=row,
                phase="decode" if traces.step[place] else "prefill",
                hidden=traces.token[place : place + 1].float(),
                retained_mean=means[row],
                visual_summary=traces.requests[request].visual_summary.float(),
                history=history,
            )
            served = inputs_from_state(state, row, traces.next_gate[place, :3])
            for name, value in vars(table.inputs(torch.tensor([place]))).items():
                torch.testing.assert_close(value, getattr(served, name), msg=f"{name} of row {place}")


def test_the_target_is_what_the_layer_d_ahead_used_in_the_same_forward(table: RowTable, write_logs: WriteLogs) -> None:
    traces = read_traces([write_logs(items=6, name="again")])
    rows = torch.arange(len(table))
    active = table.active(rows)
    for place in range(0, len(table), 7):
        for d in (1, 2, 3):
            same = (
                (traces.request == traces.request[place])
                & (traces.step == traces.step[place])
                & (traces.layer == traces.layer[place] + d)
            )
            wanted = traces.counts[same][0] > 0 if same.any() else torch.zeros(32, dtype=torch.bool)
            assert torch.equal(active[place, d - 1], wanted)
            assert bool(table[torch.tensor([place])].exists[0, d - 1]) == bool(same.any())


def test_control_the_own_router_at_distance_zero_reads_one_hundred_percent(write_logs: WriteLogs) -> None:
    traces = read_traces([write_logs(items=3)])
    decode = traces.decode
    assert hot_recall(traces.own_gate[decode], traces.counts[decode] > 0, traces.header.spec.top_k) == 1.0
    for place in (~decode).nonzero().flatten().tolist():  # a prefill activates more than k
        active = traces.counts[place] > 0
        assert hot_recall(traces.own_gate[place], active, int(active.sum())) == 1.0


def test_drift_is_what_next_gate_lacks(table: RowTable) -> None:
    rows = (table.decode(torch.arange(len(table))) & (table.target >= 0).all(1)).nonzero().flatten()
    corrected = table.inputs(rows).next_gate.log() + table.drift(rows)
    assert hot_recall(corrected, table.active(rows), table.spec.top_k) == 1.0


def test_a_window_wider_than_the_logs_is_refused(write_logs: WriteLogs) -> None:
    with pytest.raises(CorpusError, match="look 4 layers ahead, window 5"):
        RowTable(read_traces([write_logs(items=1)]), 5)


def test_images_stay_on_their_side_when_the_corpus_grows() -> None:
    names = [f"{number}.png" for number in range(400)]
    few, many = split_items(names[:200], 0.15, 0.15, 0), split_items(names, 0.15, 0.15, 0)
    assert all(many[name] == few[name] for name in few)
    sides = list(many.values())
    assert 30 < sides.count("val") < 90
    assert 30 < sides.count("test") < 90


def test_another_seed_splits_otherwise() -> None:
    names = [f"{number}.png" for number in range(50)]
    assert split_items(names, 0.2, 0.2, 0) != split_items(names, 0.2, 0.2, 1)


@pytest.mark.parametrize("count", [3, 4, 5, 16])
def test_no_side_is_empty_however_few_the_images(count: int) -> None:
    sides = set(split_items([f"{n}.png" for n in range(count)], 0.01, 0.01, 0).values())
    assert sides == {"train", "val", "test"}


def test_fewer_than_three_images_cannot_be_split() -> None:
    with pytest.raises(CorpusError, match="at least 3"):
        split_items(["a", "b", "a"], 0.2, 0.2, 0)


def test_all_rows_of_an_image_stand_on_one_side(table: RowTable) -> None:
    data = LookaheadData(table, 8, 0.3, 0.3, 0)
    requests = {side: set(table.request()[rows].tolist()) for side, rows in data.rows.items()}
    assert not requests["train"] & (requests["val"] | requests["test"])
    assert not requests["val"] & requests["test"]
    assert sum(len(rows) for rows in data.rows.values()) == int(table.useful().sum())


def test_an_epoch_is_shuffled_by_its_number_and_holds_every_row_once() -> None:
    batches = EpochBatches(torch.arange(50), 8, seed=1)
    first, again = torch.cat(list(batches)), torch.cat(list(batches))
    batches.set_epoch(1)
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.cat(list(batches)))
    assert first.sort().values.tolist() == list(range(50))


def test_a_last_batch_of_one_row_is_left_out_of_training_only() -> None:
    assert [len(rows) for rows in EpochBatches(torch.arange(9), 4, seed=0)] == [4, 4]
    assert [len(rows) for rows in EpochBatches(torch.arange(9), 4)] == [4, 4, 1]


def test_the_expert_table_counts_forwards_not_tokens(table: RowTable) -> None:
    rows = torch.arange(len(table))
    counted = table.expert_table(rows)
    assert counted.shape == (2, 5, 32)
    assert counted[1, 0].sum() == 6 * 4 * 4  # requests x decode steps x top-k
    assert counted[0].max() <= 6
