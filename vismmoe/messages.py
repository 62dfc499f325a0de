"""Conversations as files: the JSON that chat interfaces exchange (OpenAI's, and Qwen's with "image" entries).

A list of messages, or an object that holds it under "messages". Each has a role (system, user, assistant) and a
content: text, or a list of {"type": "text", "text": ...}, {"type": "image", "image": ...} and {"type": "image_url",
"image_url": {"url": ...}}. An assistant's content of null is to be answered there and then; the end always is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from vismmoe.errors import InputError
from vismmoe.images import load_images
from vismmoe.request import Message, Picture, Role
from vismmoe.untrusted import read_json

Turn = tuple[Message, ...]  # what is said before an answer; the last message is a user's


def read_turns(file: Path) -> tuple[Turn, ...]:
    """What is to be answered, in order; pictures that are named by a path lie beside the file. InputError."""
    try:
        held = read_json(file)
    except ValueError as error:
        raise InputError(f"the messages in {file} cannot be used: {error}") from None
    listed = held.get("messages") if isinstance(held, Mapping) else held
    if not isinstance(listed, list) or not listed:
        raise InputError(f'{file} holds no list of messages: give [{{"role": "user", "content": ...}}]')
    turns: list[Turn] = []
    said: list[Message] = []
    for number, one in enumerate(listed, 1):
        where = f"{file}: message {number}"
        if not isinstance(one, Mapping) or one.get("role") not in get_args(Role):
            raise InputError(f"{where} has no role of {', '.join(get_args(Role))}")
        if one["role"] == "assistant" and one.get("content") is None:
            turns.append(_closed(said, where))
            said = []
        else:
            said.append(Message(one["role"], _parts(one.get("content"), file.parent, where)))
    return (*turns, _closed(said, str(file))) if said else tuple(turns)


def with_images(turn: Turn, enough: int) -> Turn:
    """The same with its pictures read; enough: as load_images wants it. ImageError."""
    read = iter(load_images((source for said in turn for source in said.pictures), enough))
    return tuple(
        replace(said, parts=tuple(part if isinstance(part, str) else Picture(next(read)) for part in said.parts))
        for said in turn
    )


def _closed(said: list[Message], where: str) -> Turn:
    if not said or said[-1].role != "user":
        raise InputError(f"{where}: an answer is asked for where the user has said nothing")
    return tuple(said)


def _parts(content: Any, folder: Path, where: str) -> tuple[str | Picture, ...]:
    if isinstance(content, str):
        return (content,)
    if not isinstance(content, list) or not content:
        raise InputError(f"{where} has no content: give text, or a list of text and images")
    return tuple(_part(one, folder, where) for one in content)


def _part(one: Any, folder: Path, where: str) -> str | Picture:
    kind = one.get("type") if isinstance(one, Mapping) else None
    if kind == "text" and isinstance(one.get("text"), str):
        return str(one["text"])
    source = one.get(kind) if kind in ("image", "image_url") else None
    if isinstance(source, Mapping):
        source = source.get("url")
    if not isinstance(source, str):
        raise InputError(f"{where} holds a part of type {kind!r} that is no text and no image with its path or URL")
    return Picture(source if ":" in source else str(folder / source))
