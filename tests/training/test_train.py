"""Training end to end on an imagined model: learns, resumes to the same weights, leaves no run behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from vismmoe.artifact import load_artifact
from vismmoe.config import TrainConfig
from vismmoe.errors import ArtifactError, CorpusError, UsageError
from vismmoe.predictors import LookaheadNet, PredictorConfig, build_predictor
from vismmoe.trace import read_traces
from vismmoe.tracking import talking_to, tracking_uri
from vismmoe_training.data import LookaheadData
from vismmoe_training.evaluate_predictors import compare
from vismmoe_training.fitting import FitSettings, fit
from vismmoe_training.registry import register
from vismmoe_training.row_table import RowTable
from vismmoe_training.train import predictor_config, train
from vismmoe_training.warm_start import warm_start

WriteLogs = Callable[..., Path]
SMALL = {"window": 3, "hidden": 16, "rank": 24, "batch_size": 64, "max_epochs": 3, "threads": 1}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def settings(logs: Path, output: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(traces=(str(logs),), output=str(output), **{**SMALL, **changes})


def runs() -> list[Any]:
    with talking_to(tracking_uri()) as client:
        return list(client.search_runs([found.experiment_id for found in client.search_experiments()]))


def data_of(logs: Path) -> LookaheadData:
    return LookaheadData(RowTable(read_traces([logs]), 3), 64, 0.2, 0.2, 0)


def test_the_road_from_logs_to_a_registered_artifact(write_logs: WriteLogs, tmp_path: Path) -> None:
    logs, output = write_logs(items=20), tmp_path / "out" / "artifact"
    summary = train(settings(logs, output, register="scenes", alias="champion"))
    artifact = load_artifact(output, read_traces([logs]).header.spec)
    assert build_predictor(artifact).window == 3
    assert artifact.training["logs.items"] == 20
    assert artifact.metrics["held_out"]["decode"]["lookahead"]["recall@20"]["1"] > 0.6
    assert [path.name for path in output.parent.iterdir()] == ["artifact"]  # no state, nothing half-written
    assert "next gate" in str(summary)
    assert "models:/scenes@champion" in str(summary)
    assert "MLFLOW_TRACKING_URI" not in os.environ
    (run,) = runs()
    assert (run.info.run_id, run.info.status) == (summary.run_id, "FINISHED")
    assert run.data.metrics["val/recall20"] > 0.5
    assert run.data.metrics["test/next_gate_recall20_d1"] > 0.5
    again = register(output, "scenes", alias="champion")
    assert again.version == "2"
    assert {found.info.status for found in runs()} == {"FINISHED"}


def test_a_training_that_stops_early_says_so(write_logs: WriteLogs, tmp_path: Path) -> None:
    logs = write_logs(items=8)
    unmoved = settings(logs, tmp_path / "a", learning_rate=1e-12, weight_decay=0.0, patience=1, max_epochs=9)
    assert "stopped early after 2 of 9 epochs, 1 of them without" in str(train(unmoved))
    assert "\n2 epochs; rows" in str(train(settings(logs, tmp_path / "b", patience=5, max_epochs=2)))


class StopAt(Callback):
    """Fails in the middle of an epoch."""

    def __init__(self, epoch: int, batch: int, error: BaseException) -> None:
        self.at, self.error = (epoch, batch), error

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *details: Any) -> None:
        if (trainer.current_epoch, details[2]) == self.at:
            raise self.error


@pytest.mark.parametrize("network", ["guided", "published"])
def test_killed_within_an_epoch_and_resumed_the_weights_are_those_of_an_unbroken_run(
    write_logs: WriteLogs, tmp_path: Path, network: str
) -> None:
    data = data_of(write_logs(items=20))
    options = predictor_config(settings(tmp_path, tmp_path / "o", network=network, dropout=0.3))
    plan = FitSettings(max_epochs=3, patience=9, learning_rate=1e-2, weight_decay=0.0, seed=5)
    whole = fit(options, plan, data, state=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="pulled"):
        fit(options, plan, data, state=tmp_path / "cut", callbacks=[StopAt(2, 1, RuntimeError("plug pulled"))])
    torch.manual_seed(99)
    resumed = fit(options, plan, data, state=tmp_path / "cut", resume=True)
    last = [torch.load(tmp_path / name / "last.ckpt", weights_only=True) for name in ("whole", "cut")]
    assert last[0]["global_step"] == last[1]["global_step"]
    for name, value in last[0]["state_dict"].items():
        assert torch.equal(value, last[1]["state_dict"][name]), name
    assert resumed.epochs == whole.epochs == 3
    assert resumed.score == whole.score


def test_a_failed_training_ends_its_run_and_can_be_resumed_in_it(
    write_logs: WriteLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, output = write_logs(items=12), tmp_path / "artifact"
    config = settings(logs, output)
    with monkeypatch.context() as patch:
        patch.setattr("vismmoe_training.train.compare", lambda net, data: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(config)
    (failed,) = runs()
    assert failed.info.status == "FAILED"
    assert not output.exists()
    with pytest.raises(UsageError, match=r"gamma was 0\.8 and is now 0\.5"):
        train(settings(logs, output, gamma=0.5, resume=True))
    summary = train(settings(logs, output, resume=True))
    (run,) = runs()
    assert (run.info.run_id, run.info.status) == (summary.run_id, "FINISHED")
    assert load_artifact(output)


def test_an_interrupted_training_that_is_not_resumed_leaves_no_run_running(
    write_logs: WriteLogs, tmp_path: Path
) -> None:
    logs, output = write_logs(items=8), tmp_path / "artifact"
    config = settings(logs, output, max_epochs=1)
    train(config)
    with talking_to(tracking_uri()) as client:  # what kill -9 leaves behind
        client.update_run(runs()[0].info.run_id, status="RUNNING")
    state = tmp_path / "artifact.training"
    state.mkdir()
    told = {"settings": {}, "tracking_uri": tracking_uri(), "run_id": runs()[0].info.run_id}
    (state / "state.json").write_text(json.dumps(told))
    train(config)
    assert sorted(run.info.status for run in runs()) == ["FINISHED", "KILLED"]


def test_there_must_be_something_to_resume(write_logs: WriteLogs, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to resume"):
        train(settings(write_logs(items=4), tmp_path / "artifact", resume=True))


def test_mistakes_are_told_before_anything_is_trained(write_logs: WriteLogs, tmp_path: Path) -> None:
    logs = write_logs(items=4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.md").write_text("precious")
    with pytest.raises(ArtifactError, match="other files"):
        train(settings(logs, tmp_path / "mine"))
    with pytest.raises(CorpusError, match="window 5"):
        train(settings(logs, tmp_path / "a", window=5))
    with pytest.raises(UsageError, match="no registry on plain files"):
        train(settings(logs, tmp_path / "a", register="x", tracking_uri="file:///tmp/runs"))
    with pytest.raises(UsageError, match="no name of a model"):
        train(settings(logs, tmp_path / "a", register="a/b"))
    with pytest.raises(UsageError, match="per-distance"):
        train(settings(logs, tmp_path / "a", head="single"))
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "mlflow.db").exists()


def test_the_drift_is_learnt_from_few_rows_and_beats_next_gate(write_logs: WriteLogs) -> None:
    data = data_of(write_logs(items=60))
    net = LookaheadNet(PredictorConfig(window=3, rank=24, hidden_sizes=(16, 16)), data.table.spec)
    net.standardise(data.table.inputs(data.rows["train"]))
    assert warm_start(net, data) is not None
    folded = LookaheadNet(net.config, data.table.spec, folded=True)
    folded.load_state_dict(net.folded_weights())
    recall = {(r.rule, r.distance): r.recall for r in compare(folded, data) if r.phase == "decode" and r.k == 10}
    for distance in (2, 3):
        assert recall["lookahead", distance] > recall["next gate", distance] + 0.02


def test_the_published_network_has_no_drift_to_start_from(write_logs: WriteLogs) -> None:
    data = data_of(write_logs(items=6))
    assert warm_start(LookaheadNet(PredictorConfig.published(window=3), data.table.spec), data) is None
