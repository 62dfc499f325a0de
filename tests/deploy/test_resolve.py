"""Names of predictors: folders, versions, aliases; verified before use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vismmoe.artifact import Artifact, save_artifact
from vismmoe.config import EngineConfig
from vismmoe.engine import Request
from vismmoe.errors import ArtifactError, UsageError
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.types import ModelSpec
from vismmoe_deploy import load_engine, resolve
from vismmoe_training.registry import register

SPEC = ModelSpec("tiny", 3, (0, 1, 2), num_experts=4, top_k=2, hidden_size=3, expert_width=4, fingerprint="a" * 64)


def make(folder: Path, spec: ModelSpec = SPEC) -> Path:
    torch.manual_seed(0)
    config = PredictorConfig(window=2, hidden_sizes=(3, 3), rank=2)
    weights = LookaheadNet(config, spec).folded_weights()
    save_artifact(folder, Artifact("lookahead", 2, config.to_json(), spec, weights), "# Card\n")
    return folder


def test_a_folder_stands_for_itself(tmp_path: Path) -> None:
    found = resolve(str(make(tmp_path / "artifact")))
    assert (found.version, found.folder, found.artifact.window) == (None, tmp_path / "artifact", 2)


def test_aliases_and_versions_lead_to_what_was_registered_from_any_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/my runs/mlflow.db"
    (tmp_path / "my runs").mkdir()
    (tmp_path / "other").mkdir()
    first = register(make(tmp_path / "a"), "scenes", "champion", uri)
    second = register(make(tmp_path / "a"), "scenes", "champion", uri)
    assert (first.version, second.version) == ("1", "2")
    monkeypatch.chdir(tmp_path / "other")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert resolve("models:/scenes@champion").version == "2"
    old = resolve("models:/scenes/1", spec=SPEC)
    assert (old.version, old.source) == ("1", "models:/scenes/1")
    assert old.folder is not None
    assert old.folder.is_relative_to(tmp_path / "my runs")
    with pytest.raises(ArtifactError, match="There is no models:/scenes@challenger"):
        resolve("models:/scenes@challenger")
    with pytest.raises(ArtifactError, match="There is no models:/nobody/1"):
        resolve("models:/nobody/1")
    with pytest.raises(ArtifactError, match="another model"):
        resolve("models:/scenes@champion", spec=replace(SPEC, fingerprint="b" * 64))
    (old.folder / "weights.safetensors").write_bytes(b"tampered")
    with pytest.raises(ArtifactError, match="bytes where the manifest says"):
        resolve("models:/scenes/1")


@pytest.mark.parametrize("name", ["models:/", "models:/a", "models:a@b", "models:/a/latest", "models:/a/b/c@d"])
def test_names_that_cannot_be_meant_are_told_how_to_write_them(name: str) -> None:
    with pytest.raises(UsageError, match="models:/name@alias"):
        resolve(name)


def test_an_engine_uses_the_predictor_and_its_answer_stays_the_same(
    tiny_checkpoint: Path, tmp_path: Path, picture: object
) -> None:
    artifact = make(tmp_path / "artifact", open_checkpoint(tiny_checkpoint).spec)
    config = EngineConfig(model=str(tiny_checkpoint), threads=1)
    request = Request(images=(picture,), prompt="What?", max_new_tokens=4)  # type: ignore[arg-type]
    with load_engine(config) as plain, load_engine(config, str(artifact)) as guided:
        report = guided.generate(request).to_json()
        assert report["text"] == plain.generate(request).text
    assert report["predictor"] == {"kind": "lookahead", "window": 2, "source": str(artifact), "version": None}


def test_a_predictor_of_another_model_is_refused_before_the_model_is_loaded(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vismmoe_deploy.serve.Engine.load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ArtifactError, match="another model"):
        load_engine(EngineConfig(model=str(tiny_checkpoint)), str(make(tmp_path / "artifact")))
