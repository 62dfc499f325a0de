"""Where MLflow's store is, and which stores are refused."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from vismmoe import tracking
from vismmoe.errors import UsageError
from vismmoe.tracking import artifact_root, environment_kept, talking_to, tracking_uri


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


def no_database(tmp_path: Path) -> dict[str, Path]:
    """kind -> what lies in a database's place."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "letter.db").write_text("this is not a database, it is a letter to my aunt")
    return {"folder": tmp_path / "folder", "letter": tmp_path / "letter.db", "nowhere": tmp_path / "no/such/m.db"}


@pytest.mark.parametrize("kind", ["folder", "letter", "nowhere"])
def test_what_is_no_database_is_told_at_once_and_nothing_is_made(tmp_path: Path, kind: str) -> None:
    place = no_database(tmp_path)[kind]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="database"), talking_to(f"sqlite:///{place}"):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_a_locked_database_is_told_instead_of_asked_for_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "LOCKED_S", 0.01)
    with closing(sqlite3.connect(tmp_path / "m.db", isolation_level=None)) as other:
        other.execute("CREATE TABLE mine (a)")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UsageError, match="locked"), talking_to(f"sqlite:///{tmp_path}/m.db"):
            pass


def test_loggers_that_point_the_process_elsewhere_do_so_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "sqlite:////mine.db"):
        if before is not None:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", before)
        with environment_kept():
            os.environ["MLFLOW_TRACKING_URI"] = "sqlite:////theirs.db"
        assert os.environ.get("MLFLOW_TRACKING_URI") == before
