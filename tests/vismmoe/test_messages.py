"""Conversations from files: read strictly, answered turn by turn."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from vismmoe import commands
from vismmoe.config import InferConfig
from vismmoe.errors import ImageError, InputError, UsageError
from vismmoe.messages import read_turns
from vismmoe.request import Message, Picture

ASK = {"role": "user", "content": "Why?"}
LOOK = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]}
OPEN = {"role": "assistant", "content": None}


def written(folder: Path, held: Any) -> Path:
    file = folder / "chat.json"
    file.write_text(held if isinstance(held, str) else json.dumps(held))
    return file


def test_both_forms_of_images_are_read_in_their_place(tmp_path: Path) -> None:
    url = "data:image/png;base64,AAAA"
    parts = [{"type": "text", "text": "Here"}, {"type": "image_url", "image_url": {"url": url}}]
    system, said = {"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "A cat."}
    for held in ([system, LOOK, said, {"role": "user", "content": parts}],):
        wanted = (
            Message("system", ("Be brief.",)),
            Message("user", (Picture(str(tmp_path / "a.png")), "What is this?")),
            Message("assistant", ("A cat.",)),
            Message("user", ("Here", Picture(url))),
        )
        assert read_turns(written(tmp_path, held)) == (wanted,)
        assert read_turns(written(tmp_path, {"messages": held, "model": "x"})) == (wanted,)


@pytest.mark.parametrize("end", [[], [OPEN]])
def test_an_answer_is_asked_for_where_the_file_leaves_it_open_and_at_the_end(tmp_path: Path, end: list[Any]) -> None:
    turns = read_turns(written(tmp_path, [ASK, OPEN, ASK, ASK, *end]))
    assert [len(turn) for turn in turns] == [1, 2]


@pytest.mark.parametrize(
    ("held", "told"),
    [
        ("{", "cannot be used"),
        ([], "no list"),
        ({"messages": 5}, "no list"),
        (["x"], "message 1 has no role"),
        ([{"role": "tool", "content": "x"}], "has no role"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": []}], "no content"),
        ([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}], "'video'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([OPEN], "said nothing"),
        ([ASK, OPEN, OPEN], "said nothing"),
        ([ASK, {"role": "assistant", "content": "No."}], "said nothing"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_place(tmp_path: Path, held: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        read_turns(written(tmp_path, held))


def test_a_missing_file_and_a_missing_image_are_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none"):
        commands.infer(InferConfig(messages=str(tmp_path / "none.json")), io.StringIO())
    with pytest.raises(ImageError, match=r"a\.png"):
        commands.infer(InferConfig(messages=str(written(tmp_path, [LOOK])), model="none"), io.StringIO())


def test_infer_answers_every_open_turn_on_one_cache(tiny_checkpoint: Path, tmp_path: Path, picture: Any) -> None:
    picture.save(tmp_path / "a.png")
    asked = {"model": str(tiny_checkpoint), "device": "cpu", "max_new_tokens": 2}
    results = io.StringIO()
    commands.infer(InferConfig(messages=str(written(tmp_path, [LOOK, OPEN, ASK])), json=True, **asked), results)
    told = json.loads(results.getvalue())
    first, second = told["turns"]
    assert told["text"] == second["text"]
    assert (first["usage"]["cached_tokens"], first["usage"]["visual_tokens"]) == (0, 12)
    assert 0 < second["usage"]["cached_tokens"] < second["usage"]["prompt_tokens"]
    alone = io.StringIO()
    commands.infer(InferConfig(prompt="What is this?", image=(str(tmp_path / "a.png"),), json=True, **asked), alone)
    assert json.loads(alone.getvalue())["text"] == first["text"]
    assert "turns" not in json.loads(alone.getvalue())


@pytest.mark.parametrize("wrong", [{}, {"prompt": "x", "messages": "y"}, {"messages": "y", "image": ("z",)}])
def test_a_prompt_and_a_conversation_exclude_each_other(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        InferConfig(**wrong)
