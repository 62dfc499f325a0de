"""The study on a tiny real model: two objectives, resumable, shared by workers, each trial a nested run."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial
from PIL import Image

from vismmoe.config import CollectConfig, InferConfig, TrainConfig, TuneConfig
from vismmoe.errors import CorpusError, UsageError
from vismmoe.settings import read_yaml
from vismmoe.tracking import talking_to, tracking_uri
from vismmoe_training import tune_study
from vismmoe_training.collect import collect
from vismmoe_training.module import MONITOR
from vismmoe_training.tune import TuneSummary, tune
from vismmoe_training.tune_front import recommended
from vismmoe_training.tune_objective import SEEN, WARM_UP, MedianStop


@pytest.fixture(scope="module")
def road(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, make_picture: Callable[..., Image.Image]
) -> Path:
    """A folder with `images` (and questions) and `logs` of the tiny model."""
    folder = tmp_path_factory.mktemp("road")
    (folder / "images").mkdir()
    lines = []
    for number in range(6):
        make_picture(64, 48, number).save(folder / f"images/{number}.png")
        asked = {"style": "count", "prompt": "How many?", "answer": "2"}
        lines.append(json.dumps({"file_name": f"{number}.png", "questions": [asked]}))
    (folder / "images/metadata.jsonl").write_text("\n".join(lines))
    collect(
        CollectConfig(
            model=str(tiny_checkpoint),
            device="cpu",
            images=str(folder / "images"),
            output=str(folder / "logs"),
            keep_ratio=0.5,
            prefix_layers=1,
            max_new_tokens=4,
        )
    )
    return folder


@pytest.fixture
def ask(
    road: Path, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., TuneSummary]:
    """tune(...) with small settings in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(**changes: Any) -> TuneSummary:
        settings: dict[str, Any] = {
            "traces": (str(road / "logs"),),
            "output": str(tmp_path / "best.yaml"),
            "storage": f"sqlite:///{tmp_path}/tune.db",
            "model": str(tiny_checkpoint),
            "images": str(road / "images"),
            "questions": 2,
            "trials": 2,
            "max_epochs": 1,
            "slots": 4,
            "profile": str(Path(__file__).resolve().parents[2] / "configs/devices/cpu-2-cores.yaml"),
        }
        return tune(TuneConfig(**{**settings, **changes}))

    return run


def runs() -> list[Any]:
    with talking_to(tracking_uri()) as client:
        return list(client.search_runs([found.experiment_id for found in client.search_experiments()]))


def test_workers_that_saw_the_same_trial_missing_do_not_run_it_twice() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    calls: list[int] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        calls.append(trial.number)
        return 1.0, 1.0

    limited = tune_study.no_surplus(objective, study, trials=2)
    study.tell(study.ask(), (1.0, 1.0))
    assert (tune_study.finished(study), tune_study.begun(study)) == (1, 1)
    mine, another = study.ask(), study.ask()  # both workers looked before either began
    with pytest.raises(tune_study.Surplus):
        limited(another)
    assert limited(mine) == (1.0, 1.0)
    assert calls == [mine.number]
    assert tune_study.begun(study) == 3
    study.tell(another, state=TrialState.FAIL)
    assert tune_study.begun(study) == 2


def test_the_front_is_written_as_configs_that_three_commands_read(ask: Callable[..., TuneSummary]) -> None:
    summary = ask()
    assert summary.trials == 2
    first = optuna.load_study(study_name="vismmoe", storage="sqlite:///tune.db").trials[0].params
    assert (first["trade_off"], first["keep_ratio"], first["gamma"]) == (2.0, 0.5, 0.8)  # the published constants
    assert len(summary.files) == 1 + len(summary.points)
    for file in summary.files:
        for config in (TrainConfig, InferConfig, CollectConfig):
            assert read_yaml(file, config)
    train, infer = read_yaml(summary.output, TrainConfig), read_yaml(summary.output, InferConfig)
    assert (train["window"], train["hidden"]) == (summary.best["window"], summary.best["hidden"])
    assert infer["trade_off"] == pytest.approx(summary.best["trade_off"])
    assert infer["keep_ratio"] == pytest.approx(summary.best["keep_ratio"])
    found = runs()
    trials = [run for run in found if "mlflow.parentRunId" in run.data.tags]
    (parent,) = (run for run in found if run not in trials)
    assert len(trials) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in trials} == {parent.info.run_id}
    assert {run.info.status for run in (parent, *trials)} == {"FINISHED"}
    assert all(run.data.metrics["stall_ms"] >= 0 for run in trials)


def heard_of_an_hour_ago(database: Path, trial_id: int) -> None:
    """Move the one sign of life back: the database's clock has whole seconds, so waiting two of them proves nothing."""
    storage = optuna.storages.RDBStorage(f"sqlite:///{database}", heartbeat_interval=1)
    storage.record_heartbeat(trial_id)
    storage.engine.dispose()
    with closing(sqlite3.connect(database)) as tables, tables:
        told = "UPDATE trial_heartbeats SET heartbeat = datetime(heartbeat, '-1 hour') WHERE trial_id = ?"
        assert tables.execute(told, (trial_id,)).rowcount == 1


def test_a_resumed_study_runs_what_is_missing_and_goes_on_with_what_a_killed_worker_left(
    ask: Callable[..., TuneSummary], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(trials=1)
    study = optuna.load_study(study_name="vismmoe", storage=f"sqlite:///{tmp_path}/tune.db")
    died = study.ask()  # what kill -9 leaves: a trial that has begun, was heard of once and never again
    died.suggest_float("trade_off", 0.0, 4.0, step=0.5)
    run = tune_study.TrackedRun.start("vismmoe", None)
    died.set_user_attr(tune_study.RUN, {"uri": run.uri, "id": run.run_id})
    heard_of_an_hour_ago(tmp_path / "tune.db", died._trial_id)
    assert ask(trials=2).trials == 2
    study = optuna.load_study(study_name="vismmoe", storage=f"sqlite:///{tmp_path}/tune.db")
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    assert study.trials[2].params["trade_off"] == study.trials[1].params["trade_off"]
    assert study.trials[0].params != study.trials[2].params
    assert sorted(run.info.status for run in runs()) == ["FINISHED"] * 3 + ["KILLED"]
    capsys.readouterr()
    ask(trials=2)
    assert "trial" not in capsys.readouterr().err
    with pytest.raises(UsageError, match="max_epochs 1, now it is 2"):
        ask(trials=3, max_epochs=2)


def test_what_cannot_be_done_is_told_before_any_trial(ask: Callable[..., TuneSummary], tmp_path: Path) -> None:
    for changes, said in (
        ({"output": "best.txt"}, "best.txt"),
        ({"storage": "sqlite:////nowhere/at/all/tune.db"}, "nowhere"),
        ({"storage": "potatoes"}, "potatoes"),
    ):
        with pytest.raises(UsageError, match=said):
            ask(**changes)
    with pytest.raises(CorpusError, match="questions"):
        ask(images=str(tmp_path))
    assert not (tmp_path / "best.yaml").exists()


def point(stall: float, accuracy: float) -> optuna.trial.FrozenTrial:
    return create_trial(values=[stall, accuracy])


def test_recommended_is_the_least_stall_that_answers_well_enough() -> None:
    points = [point(1.0, 0.5), point(2.0, 0.86), point(3.0, 0.88), point(4.0, 0.9)]
    assert recommended(points).values == [2.0, 0.86]  # 0.95 * 0.9 = 0.855


def test_a_trial_under_the_median_of_the_others_at_the_same_pass_is_pruned() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    for number in range(WARM_UP):
        study.add_trial(create_trial(values=[1, 1], user_attrs={SEEN: [0.1 * number, 0.5]}))  # median 0.2, then 0.5
    passes = iter([0.25, 0.3])
    stop, trainer = MedianStop(study.ask({"x": FloatDistribution(0, 1)})), SimpleNamespace()
    trainer.callback_metrics = {MONITOR: next(passes)}
    stop.on_validation_end(trainer, None)  # type: ignore[arg-type]
    trainer.callback_metrics = {MONITOR: next(passes)}
    with pytest.raises(optuna.TrialPruned):
        stop.on_validation_end(trainer, None)  # type: ignore[arg-type]
