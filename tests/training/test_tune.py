from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from vismmoe.config import TrainConfig, TuneConfig
from vismmoe.errors import UsageError
from vismmoe.settings import read_yaml
from vismmoe_training.tune import tune

WriteLogs = Callable[..., Path]


def asked(folder: Path, logs: Path, **changes: object) -> TuneConfig:
    settings: dict[str, object] = {
        "traces": (str(logs),),
        "output": str(folder / "best.yaml"),
        "storage": f"sqlite:///{folder}/tune.db",
        "trials": 2,
        "max_epochs": 1,
        "threads": 1,
    }
    return TuneConfig(**{**settings, **changes})  # type: ignore[arg-type]


def test_the_best_settings_are_a_config_that_train_reads(tmp_path: Path, write_logs: WriteLogs) -> None:
    summary = tune(asked(tmp_path, write_logs(items=10)))
    read = read_yaml(summary.output, TrainConfig)
    assert summary.trials == 2
    assert 0 < summary.recall <= 1
    assert {name: read[name] for name in summary.best} == pytest.approx(summary.best)
    assert set(summary.best) == {"window", "gamma", "hidden", "dropout", "learning_rate"}
    assert "vismmoe eval" in str(summary)


def test_a_resumed_study_only_runs_what_is_missing_and_tries_something_else(
    tmp_path: Path, write_logs: WriteLogs, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = write_logs(items=10)
    tune(asked(tmp_path, logs, trials=1))
    tune(asked(tmp_path, logs, trials=2))
    capsys.readouterr()
    assert tune(asked(tmp_path, logs, trials=2)).trials == 2
    assert "trial" not in capsys.readouterr().err
    first, second = optuna.load_study(study_name="vismmoe", storage=f"sqlite:///{tmp_path}/tune.db").trials
    assert first.params != second.params


def test_a_trial_that_was_killed_is_not_counted(tmp_path: Path, write_logs: WriteLogs) -> None:
    logs = write_logs(items=10)
    tune(asked(tmp_path, logs, trials=1))
    study = optuna.load_study(study_name="vismmoe", storage=f"sqlite:///{tmp_path}/tune.db")
    study.ask()  # what kill -9 leaves: a trial that runs for ever
    assert tune(asked(tmp_path, logs, trials=2)).trials == 2


def test_a_study_of_other_settings_is_not_mixed_in(tmp_path: Path, write_logs: WriteLogs) -> None:
    logs = write_logs(items=10)
    tune(asked(tmp_path, logs, trials=1))
    with pytest.raises(UsageError, match="max_epochs 1, now it is 2"):
        tune(asked(tmp_path, logs, trials=2, max_epochs=2))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output": "best.txt"}, "best.txt"),
        ({"storage": "sqlite:////nowhere/at/all/tune.db"}, "nowhere"),
        ({"storage": "potatoes"}, "potatoes"),
    ],
)
def test_what_cannot_be_written_is_told_before_any_trial(
    tmp_path: Path, write_logs: WriteLogs, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        tune(asked(tmp_path, write_logs(items=4), **changes))
    assert not (tmp_path / "best.yaml").exists()
