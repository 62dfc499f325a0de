"""A folder of image files; a metadata.jsonl beside them may hold questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe.untrusted import parse_json, read_text
from vismmoe_training.corpus.items import Corpus, CorpusItem, question_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
METADATA = "metadata.jsonl"


def open_folder(folder: Path, prompt: str) -> Corpus:
    """All images below `folder` and those that its metadata name. Raises CorpusError when there are none."""
    described = _metadata(folder)
    names = sorted({str(path.relative_to(folder).as_posix()) for path in images_in(folder)} | set(described))
    if not names:
        raise CorpusError(f"{folder} holds no image ({', '.join(SUFFIXES)}).")
    items = [
        CorpusItem(name, folder / name, question_of(described.get(name, {}), index, prompt))
        for index, name in enumerate(names)
    ]
    return Corpus(str(folder), len(items), items)


def images_in(folder: Path) -> list[Path]:
    """Image files below `folder`, hidden ones left out."""
    hidden = (path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    return [path for path in hidden if path.suffix.lower() in SUFFIXES and path.is_file()]


def json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(number, object) of each line that is not empty. Raises CorpusError for anything but objects."""
    found = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if line.strip():
            found.append((number, _object(path, number, line)))
    return found


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        raise CorpusError(f"{path} cannot be used: {error}.") from None


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        told = parse_json(line)
    except ValueError:
        raise CorpusError(f"{path}, line {number}: this is not JSON.") from None
    if not isinstance(told, dict):
        raise CorpusError(f"{path}, line {number}: there is no file_name.")
    return told


def _metadata(folder: Path) -> dict[str, Mapping[str, Any]]:
    """file name relative to `folder` -> its line in the metadata.jsonl beside it."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.rglob(METADATA)):
        for number, told in json_lines(path):
            if not isinstance(told.get("file_name"), str):
                raise CorpusError(f"{path}, line {number}: there is no file_name.")
            file = inside(folder, path.parent / told["file_name"], f"{path}, line {number}")
            found[file.relative_to(folder).as_posix()] = told
    return found


def inside(folder: Path, file: Path, where: str) -> Path:
    """`file`, unless it lies outside `folder`: a list from elsewhere must not name what else is on this disk."""
    try:
        within = file.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the name, links in a circle
        raise CorpusError(f"{where}: {str(file)[-200:]!r} can be no file ({error}).") from None
    if not within:
        raise CorpusError(f"{where}: {str(file)!r} lies outside the corpus {folder}.")
    return file
