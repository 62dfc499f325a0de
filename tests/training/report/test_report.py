"""`vismmoe report` on logs, on a predictor, on a run, on a study; what it lacks it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from vismmoe.cli import main
from vismmoe.config import TrainConfig
from vismmoe_training.train import TrainSummary, train


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"window": 3, "hidden": 16, "rank": 8, "max_epochs": 1}


@pytest.fixture
def trained(write_logs: Any, tmp_path: Path, settings: dict[str, Any]) -> tuple[str, TrainSummary, str]:
    """(logs, training, tracking address)."""
    logs, uri = str(write_logs(items=12)), f"sqlite:///{tmp_path / 'mlflow.db'}"
    config = TrainConfig(traces=(logs,), output=str(tmp_path / "artifact"), tracking_uri=uri, **settings)
    return logs, train(config), uri


def test_logs_and_a_predictor_give_one_page_and_its_pictures_in_mlflow(
    trained: tuple[str, TrainSummary, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs, training, uri = trained
    out = tmp_path / "report"
    words = ["--traces", logs, "--artifact", str(training.output), "--output", str(out), "--tracking-uri", uri]
    assert main(["report", *words]) == 0
    told, text = capsys.readouterr().out, (out / "report.html").read_text()
    assert "is another model than the one that was logged" in told  # these logs are of no real model
    for heading in ("How well experts are foreseen", "What memory and foresight buy", "One request, from its first"):
        assert heading in text
    drawn = {path.stem for path in (out / "pictures").iterdir()}
    assert drawn == {"recall-by-distance", "recall-by-layer", "pareto", "timeline"}
    assert "when the predictor was trained" in text
    from mlflow import MlflowClient

    run = told.split("logged to MLflow run ")[1].split()[0]
    assert "report/report.html" in [each.path for each in MlflowClient(uri).list_artifacts(run, "report")]


def test_a_run_is_enough_and_gets_the_page(
    trained: tuple[str, TrainSummary, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, training, uri = trained
    words = ["report", "--run", training.run_id, "--output", str(tmp_path / "out"), "--tracking-uri", uri]
    assert main(words) == 0
    assert f"logged to MLflow run {training.run_id}" in capsys.readouterr().out
    text = (tmp_path / "out" / "report.html").read_text()
    assert "max_epochs 1" in text
    assert "on images that it had not seen" in text
    assert {path.stem for path in (tmp_path / "out" / "pictures").iterdir()} == {"recall-by-distance"}


def test_a_study_is_drawn_with_its_front(write_logs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = f"sqlite:///{tmp_path / 'tune.db'}"
    study = optuna.create_study(storage=storage, study_name="one", directions=["minimize", "maximize"])
    for stall, accuracy in ((5.0, 0.9), (3.0, 0.88), (4.0, 0.5), (1.0, 0.4)):
        study.add_trial(optuna.trial.create_trial(values=[stall, accuracy]))
    words = ["report", "--traces", str(write_logs(items=4)), "--study", "one", "--storage", storage, "--no-log"]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    table = text.split("recommended\n")[1].split("</pre>")[0].splitlines()[1:]
    assert [line.split() for line in table] == [["1.000", "0.400"], ["3.000", "0.880", "&lt;"], ["5.000", "0.900"]]
    assert "MLflow" not in capsys.readouterr().out
    assert main([*words[:4], "two", *words[5:], "--output", str(tmp_path / "out")]) == 2
    assert "'two'" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused(write_logs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--output", str(tmp_path / "out"), "--no-log"]
    assert main(["report", *out]) == 2
    assert "Nothing to report on" in capsys.readouterr().err
    assert main(["report", "--traces", str(tmp_path / "none"), *out]) == 3
    assert main(["report", "--artifact", str(tmp_path / "none"), *out]) == 3
    (tmp_path / "file").write_text("")
    assert main(["report", "--traces", str(write_logs(items=4)), "--no-log", "--output", str(tmp_path / "file")]) == 2
    assert not (tmp_path / "out").exists()
