from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from vismmoe import config as configs
from vismmoe.config import (
    CollectConfig,
    Config,
    InferConfig,
    PlanConfig,
    RegisterConfig,
    TrainConfig,
    TuneConfig,
    resolve_model,
)
from vismmoe.errors import CheckpointError, UsageError
from vismmoe.schema import options

ALL: tuple[type[Config], ...] = (InferConfig, PlanConfig, CollectConfig, TrainConfig, TuneConfig, RegisterConfig)
LEAST: dict[type[Config], dict[str, Any]] = {
    InferConfig: {"prompt": "What is this?"},
    PlanConfig: {},
    CollectConfig: {"images": "pictures", "output": "traces"},
    TrainConfig: {"traces": ("traces",), "output": "artifact"},
    TuneConfig: {"traces": ("traces",), "output": "best.yaml"},
    RegisterConfig: {"artifact": "artifact", "name": "scenes"},
}


@pytest.mark.parametrize("kind", ALL)
def test_every_field_has_a_sentence_for_its_help(kind: type[Config]) -> None:
    silent = [option.name for option in options(kind) if not option.doc.endswith(".") or not option.doc[0].isupper()]
    assert silent == []


@pytest.mark.parametrize("kind", ALL)
def test_defaults_lie_within_their_own_ranges(kind: type[Config]) -> None:
    kind(**LEAST[kind])


@pytest.mark.parametrize("kind", ALL)
def test_configs_cannot_be_written_to(kind: type[Config]) -> None:
    made = kind(**LEAST[kind])
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.__setattr__(dataclasses.fields(made)[0].name, "other")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (InferConfig, "keep_ratio", 1.5),
        (InferConfig, "keep_ratio", 0.0),
        (InferConfig, "keep_ratio", float("nan")),
        (InferConfig, "salient_ratio", -0.1),
        (InferConfig, "trade_off", float("inf")),
        (InferConfig, "device_memory", -1),
        (InferConfig, "max_new_tokens", 0),
        (InferConfig, "lookahead_top", 0),
        (PlanConfig, "context", 0),
        (CollectConfig, "limit", 0),
        (TrainConfig, "window", 0),
        (TrainConfig, "gamma", 1.01),
        (TrainConfig, "learning_rate", 0.0),
        (TrainConfig, "dropout", 1.0),
        (TuneConfig, "trials", 0),
    ],
)
def test_a_number_out_of_range_is_a_usage_error_that_names_flag_and_value(
    kind: type[Config], field: str, value: float
) -> None:
    with pytest.raises(UsageError) as caught:
        kind(**{**LEAST[kind], field: value})
    assert "--" + field.replace("_", "-") in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (CollectConfig, "output", ""),
        (CollectConfig, "images", " "),
        (TrainConfig, "traces", ("logs", "")),
        (InferConfig, "model", ""),
        (InferConfig, "predictor", ""),
        (RegisterConfig, "name", ""),
        (TuneConfig, "output", ""),
    ],
)
def test_an_empty_name_is_refused_and_does_not_mean_the_working_folder(
    kind: type[Config], field: str, value: object
) -> None:
    with pytest.raises(UsageError, match=f"--{field} .* is empty: name an? [A-Z]"):
        kind(**{**LEAST[kind], field: value})


def test_an_alias_without_a_registered_name_is_refused() -> None:
    with pytest.raises(UsageError, match="--register"):
        TrainConfig(traces=("t",), output="o", alias="champion")


def test_streaming_and_json_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="--stream"):
        InferConfig(prompt="x", stream=True, json=True)


def test_a_model_that_is_named_is_taken_as_it_is() -> None:
    assert resolve_model("some/folder") == "some/folder"


def test_the_reference_model_is_found_in_the_working_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / configs.REFERENCE_MODEL).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Path(resolve_model(configs.REFERENCE_MODEL)).resolve() == (tmp_path / configs.REFERENCE_MODEL).resolve()


def test_the_reference_model_is_found_beside_an_editable_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "clone" / configs.REFERENCE_MODEL).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "clone/vismmoe/config.py"))
    assert resolve_model(configs.REFERENCE_MODEL) == str(tmp_path / "clone" / configs.REFERENCE_MODEL)


def test_a_missing_reference_model_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "lib/vismmoe/config.py"))
    with pytest.raises(CheckpointError, match="--model"):
        resolve_model(configs.REFERENCE_MODEL)
