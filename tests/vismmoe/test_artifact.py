"""Artifact folders: whole or not at all, and nothing odd is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vismmoe.artifact import Artifact, load_artifact, save_artifact
from vismmoe.errors import ArtifactError
from vismmoe.predictors import LookaheadNet, PredictorConfig, build_predictor
from vismmoe.types import ModelSpec

SPEC = ModelSpec("tiny", 3, (0, 1, 2), num_experts=4, top_k=2, hidden_size=3, expert_width=4, fingerprint="a" * 64)
CONFIG = PredictorConfig(window=2, hidden_sizes=(3, 3), rank=2)


def artifact() -> Artifact:
    torch.manual_seed(0)
    weights = LookaheadNet(CONFIG, SPEC).folded_weights()
    return Artifact("lookahead", 2, CONFIG.to_json(), SPEC, weights, metrics={"held_out": {"x": 0.5}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_artifact(tmp_path / "artifact", artifact(), "# A card\n")
    return tmp_path / "artifact"


def test_what_is_saved_is_loaded(folder: Path) -> None:
    loaded = load_artifact(folder, SPEC)
    assert {**vars(loaded), "tensors": 0} == {**vars(artifact()), "tensors": 0}
    assert all(torch.equal(loaded.tensors[name], value) for name, value in artifact().tensors.items())
    assert build_predictor(loaded).window == 2


def test_the_folder_holds_json_safetensors_and_a_card_only(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "weights.safetensors", "README.md"}
    assert not list(folder.parent.glob(".artifact*"))


def test_an_artifact_may_be_replaced_and_nothing_else_is_overwritten(folder: Path) -> None:
    save_artifact(folder, replace(artifact(), metrics={}), "# Another\n")
    assert load_artifact(folder).metrics == {}
    (folder / "thesis.md").write_text("years of work")
    with pytest.raises(ArtifactError, match="other files"):
        save_artifact(folder, artifact(), "")
    assert (folder / "thesis.md").exists()


def test_an_artifact_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(ArtifactError, match="another model"):
        load_artifact(folder, replace(SPEC, fingerprint="b" * 64))


def test_figures_that_are_no_numbers_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_artifact(tmp_path / "x", replace(artifact(), metrics={"a": float("nan")}), "")
    assert not (tmp_path / "x").exists()


Damage = Callable[[Path], object]


def rewrite(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def name_another_file(name: str) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["files"][name] = manifest["files"]["README.md"]
        path.write_text(json.dumps(manifest))

    return damage


def link_weights(folder: Path) -> None:
    (folder / "weights.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "weights.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(data)


def add_bytes(folder: Path) -> None:
    with (folder / "weights.safetensors").open("ab") as file:
        file.write(b"more")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "cannot be read"),
    "empty manifest": (lambda folder: (folder / "manifest.json").write_text("{}"), "schema"),
    "no JSON": (lambda folder: (folder / "manifest.json").write_text("<html>"), "not JSON"),
    "no text": (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\x00"), "not JSON"),
    "nested without end": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "not JSON"),
    "NaN": (lambda folder: (folder / "manifest.json").write_text('{"schema": NaN}'), "not JSON"),
    "huge manifest": (lambda folder: (folder / "manifest.json").write_text(" " * 5_000_000), "larger than"),
    "later version": (rewrite(version=2), "version 2"),
    "extra key": (rewrite(pickle="gASV"), "pickle"),
    "window of another type": (rewrite(window="2"), "window"),
    "metrics of another type": (rewrite(metrics=[]), "metrics"),
    "no spec": (rewrite(spec={}), "description of the model"),
    "impossible spec": (rewrite(spec={**vars(SPEC), "moe_layers": [9]}), "description of the model"),
    "no files": (rewrite(files={}), "must list"),
    "no checksum": (rewrite(files={"weights.safetensors": "fine"}), "no checksum"),
    "path outside": (name_another_file("../secret.json"), "outside the folder"),
    "absolute path": (name_another_file("/etc/passwd.json"), "outside the folder"),
    "code named": (name_another_file("run.py"), "strange kind"),
    "a file that is not there": (name_another_file("gone.md"), "cannot be read"),
    "no weights": (lambda folder: (folder / "weights.safetensors").unlink(), "cannot be read"),
    "flipped bit": (flip_a_bit, "checksum"),
    "longer file": (add_bytes, "bytes where the manifest says"),
    "code beside": (lambda folder: (folder / "run.py").write_text("import os"), "'run.py'"),
    "pickle beside": (lambda folder: (folder / "model.pkl").write_bytes(b"x"), "'model.pkl'"),
    "unlisted file": (lambda folder: (folder / "extra.json").write_text("{}"), "does not name"),
    "folder inside": (lambda folder: (folder / "inner.json").mkdir(), "plain files"),
    "link": (link_weights, "a link"),
    "pipe": (lambda folder: os.mkfifo(folder / "pipe.json"), "a device"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_whatever_is_odd_is_refused_in_a_sentence(folder: Path, case: str) -> None:
    damage, told = DAMAGES[case]
    damage(folder)
    with pytest.raises(ArtifactError, match=told) as refusal:
        load_artifact(folder)
    assert str(folder) in str(refusal.value)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="There is no predictor artifact"):
        load_artifact(tmp_path / "gone")


def test_weights_that_are_no_safetensors_are_refused_even_with_the_right_checksum(folder: Path) -> None:
    import hashlib

    data = b"\x80\x04N." * 10
    (folder / "weights.safetensors").write_bytes(data)
    told = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    files = json.loads((folder / "manifest.json").read_text())["files"]
    rewrite(files={**files, "weights.safetensors": told})(folder)
    with pytest.raises(ArtifactError, match="not valid safetensors"):
        load_artifact(folder)


def tensor_of(shape: tuple[int, ...], value: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"kind": "oracle"}, "kind 'oracle'"),
        ({"window": 3}, "window 3 and 2"),
        ({"config": {}}, "exactly the keys"),
        ({"config": {**CONFIG.to_json(), "rank": 0}}, "rank"),
        ({"config": {**CONFIG.to_json(), "hidden_sizes": [16000, 16000], "rank": 8000}}, "of shape"),
    ],
)
def test_a_description_that_does_not_fit_the_weights_is_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ArtifactError, match=told):
        build_predictor(replace(artifact(), **change))


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (tensor_of((5,)), "of shape"),
        (tensor_of((3,), dtype=torch.float16), "float16"),
        (tensor_of((3,), float("nan")), "not finite"),
        (None, "lack or add"),
    ],
)
def test_weights_of_another_form_are_refused(tensor: torch.Tensor | None, told: str) -> None:
    tensors = dict(artifact().tensors)
    del tensors["trunk.0.bias"]
    if tensor is not None:
        tensors["trunk.0.bias"] = tensor
    with pytest.raises(ArtifactError, match=told):
        build_predictor(replace(artifact(), tensors=tensors))
