"""Where MLflow's store is, and which stores are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from vismmoe.errors import UsageError
from vismmoe.tracking import artifact_root, tracking_uri


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_without_any_setting_it_is_a_database_in_the_working_folder(tmp_path: Path) -> None:
    assert tracking_uri() == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_flag_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert tracking_uri() == "http://server:5000"
    assert tracking_uri("sqlite:///a.db") == f"sqlite:///{tmp_path}/a.db"


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "mlruns", "/tmp/mlruns", "./mlruns", "databricks"])
def test_plain_files_hold_no_registry_and_the_way_out_is_told(uri: str) -> None:
    with pytest.raises(UsageError, match=r"sqlite:///mlflow\.db"):
        tracking_uri(uri)


def test_artifacts_lie_beside_the_database_wherever_a_command_runs(tmp_path: Path) -> None:
    root = artifact_root(tracking_uri("sqlite:///my runs/mlflow.db"))
    assert root == (tmp_path / "my runs/mlflow-artifacts").as_uri()
    assert artifact_root("http://server:5000") is None
