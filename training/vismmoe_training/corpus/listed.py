"""Images that a JSON file lists, with paths relative to it: LLaVA conversations, COCO annotations, JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe.untrusted import read_json
from vismmoe_training.corpus.folder import inside, json_lines
from vismmoe_training.corpus.items import Corpus, CorpusItem, question_of

_IMAGE_KEYS = ("image", "file_name", "images")


def open_listed(path: Path, prompt: str, images: Path | None) -> Corpus:
    """The items of a .json or .jsonl file; their files lie below `images`, else below the file's own folder.

    Entries without an image (LLaVA mixes have them) are left out. Raises CorpusError for other JSON.
    """
    entries = [told for _, told in json_lines(path)] if path.suffix == ".jsonl" else _entries(path)
    folder = images or path.parent
    named = [(file, told) for told in entries if (file := _image_of(told))]
    if not named:
        raise CorpusError(f"{path} names no image: LLaVA (image, conversations) and COCO (images: file_name) are read.")
    names = _distinct([file for file, _ in named])
    items = [
        CorpusItem(name, inside(folder, folder / file, str(path)), question_of(told, index, prompt))
        for index, (name, (file, told)) in enumerate(zip(names, named, strict=True))
    ]
    if not any(isinstance(item.image, Path) and item.image.is_file() for item in items):
        raise CorpusError(f"{path} lists {names[0]} and others, but none is in {folder}: --image-folder says where.")
    return Corpus(str(path), len(items), items)


def _entries(path: Path) -> list[dict[str, Any]]:
    """The list of a LLaVA file, or the images of a COCO one, each with the questions that are asked about it."""
    try:
        told = read_json(path)
    except ValueError as error:
        raise CorpusError(f"{path} cannot be used: {error}.") from None
    images = told.get("images") if isinstance(told, dict) else told
    if not isinstance(images, list):
        raise CorpusError(f"{path} is neither a list (LLaVA) nor an object with images (COCO).")
    entries = [entry for entry in images if isinstance(entry, dict)]
    if not isinstance(told, dict):
        return entries
    asked = _questions_by_image(told)
    return [{**entry, "questions": asked.get(str(entry.get("id")), [])} for entry in entries]


def _questions_by_image(coco: dict[str, Any]) -> dict[str, list[str]]:
    """COCO's own annotations hold captions and boxes; VQA files in its form hold a question each."""
    found: dict[str, list[str]] = {}
    for key in ("annotations", "questions"):
        told = coco.get(key)
        for annotation in told if isinstance(told, list) else []:
            if isinstance(annotation, dict) and isinstance(annotation.get("question"), str):
                found.setdefault(str(annotation.get("image_id")), []).append(annotation["question"])
    return found


def _image_of(told: dict[str, Any]) -> str:
    """The (first) image that an entry names; empty when it names none."""
    value = next((told[key] for key in _IMAGE_KEYS if told.get(key)), "")
    first = value[0] if isinstance(value, list) else value
    return first if isinstance(first, str) else ""


def _distinct(names: Sequence[str]) -> list[str]:
    """Names by which items are known: a file that is listed again gets the number of its listing."""
    seen: dict[str, int] = {}
    told = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        told.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return told
