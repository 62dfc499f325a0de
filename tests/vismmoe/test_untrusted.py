"""JSON that others wrote: a value, or one sentence; never a hang, a crash or a number beyond all numbers."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vismmoe.types import ModelSpec
from vismmoe.untrusted import parse_json, read_json, spec_from_json

SPEC = asdict(ModelSpec("tiny", 3, (1, 2), 4, 2, 3, 4, "abc")) | {"moe_layers": [1, 2]}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[" * 200_000 + "]" * 200_000, "too deeply"),
        ("[NaN]", "NaN is no number"),
        ("[1e999]", "beyond every number"),
        ("9" * 6000, "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
    ],
    ids=["cut off", "deep", "nan", "infinite", "long number", "other encoding"],
)
def test_what_is_no_json_of_ours_is_one_kind_of_error(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_json(text)


def test_transformers_may_write_infinity_and_nobody_else() -> None:
    assert parse_json("[Infinity, 1.5]", infinite=True) == [float("inf"), 1.5]


def test_a_pipe_a_folder_and_a_circle_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.symlink("circle", tmp_path / "circle")
    for name in ("pipe", ".", "circle", "nothing"):
        with pytest.raises(ValueError, match=r"no regular file|cannot be read"):
            read_json(tmp_path / name)


def test_a_description_of_a_model_comes_back() -> None:
    assert spec_from_json(SPEC) == ModelSpec("tiny", 3, (1, 2), 4, 2, 3, 4, "abc")


@pytest.mark.parametrize(
    "change",
    [
        {"num_experts": 10**18},
        {"num_experts": "4"},
        {"num_experts": -4},
        {"num_experts": True},
        {"hidden_size": 3.5},
        {"top_k": 0},
        {"top_k": 5},
        {"moe_layers": [1, 2**40]},
        {"moe_layers": [2, 1]},
        {"moe_layers": [1, 1]},
        {"moe_layers": []},
        {"moe_layers": "ab"},
        {"moe_layers": [{}]},
        {"moe_layers": None},
        {"family": [1]},
        {"more": 1},
    ],
    ids=str,
)
def test_a_description_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its description of the model"):
        spec_from_json({**SPEC, **change})
    with pytest.raises(ValueError, match="its description of the model"):
        spec_from_json([1])
