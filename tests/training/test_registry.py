"""Runs never stay RUNNING; what is no sound artifact is not registered."""

from __future__ import annotations

from pathlib import Path

import pytest

from vismmoe.errors import ArtifactError, UsageError
from vismmoe.tracking import talking_to, tracking_uri
from vismmoe_training.registry import ModelVersion, TrackedRun, check_name, register


def status(run: TrackedRun) -> str:
    with talking_to(run.uri) as client:
        return str(client.get_run(run.run_id).info.status)


@pytest.mark.parametrize(
    ("error", "expected"), [(None, "FINISHED"), (ValueError(), "FAILED"), (KeyboardInterrupt(), "KILLED")]
)
def test_a_run_ends_however_its_work_ends(tmp_path: Path, error: BaseException | None, expected: str) -> None:
    run = TrackedRun.start("tests", f"sqlite:///{tmp_path}/my runs.db")
    assert run.is_running()
    try:
        with run:
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt):
        pass
    assert status(run) == expected


def test_what_is_no_artifact_is_not_registered(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(ArtifactError, match="There is no predictor artifact"):
        register(tmp_path / "gone", "name", tracking_uri=uri)
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize("name", ["a/b", "a:b", "a@b", "a\nb", " a", "x" * 3000, "a\udcff"])
def test_a_name_that_no_predictor_could_be_asked_for_by_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no name of a model"):
        check_name(name)


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.db").write_text("this is not a database, it is a letter to my aunt")
    with pytest.raises(UsageError, match=r"broken\.db"):
        TrackedRun.start("tests", f"sqlite:///{tmp_path}/broken.db")


def test_a_version_tells_the_flags_that_find_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    here, elsewhere = tracking_uri(), f"sqlite:///{tmp_path}/other place/mlflow.db"
    assert str(ModelVersion("scenes", "3", "champion", here)).endswith("--predictor models:/scenes@champion")
    told = str(ModelVersion("scenes", "3", None, elsewhere))
    assert told.endswith(f"--predictor models:/scenes/3 --tracking-uri '{elsewhere}'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "file:/nowhere")
    assert "--tracking-uri" in str(ModelVersion("scenes", "3", None, here))
