"""Images with questions, from a folder or from parquet; the only file that imports Hugging Face `datasets`.

Nothing is decoded here: an item that turns out to be unreadable is the reader's business to skip.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
METADATA = "metadata.jsonl"
_QUESTION_KEYS = ("prompt", "question")
_UNBUILT = {
    ".json": "LLaVA and COCO json",
    ".jsonl": "json lines without a folder",
    ".tar": "webdataset",
}


@dataclass(frozen=True)
class CorpusItem:
    """One image of a corpus and what to ask about it."""

    name: str  # unique in its corpus, the same in every run
    image: Path | bytes  # file, or encoded bytes
    prompt: str


class Corpus:
    """Items in a fixed order; `size` of them."""

    def __init__(self, name: str, size: int, items: Sequence[CorpusItem] | ParquetItems) -> None:
        self.name, self.size, self._items = name, size, items

    def __iter__(self) -> Iterator[CorpusItem]:
        return iter(self._items)


def open_corpus(source: str, prompt: str) -> Corpus:
    """The corpus at `source`; `prompt` is asked where it has no question of its own.

    An item with several questions is asked one of them, in turn, so that a corpus mixes their styles. Raises
    CorpusError when there is nothing there, no image in it, or a form that is not read yet.
    """
    path = Path(source)
    if path.is_dir():
        if not _images_in(path) and _parquet_in(path):
            return _parquet(path, _parquet_in(path), prompt)
        return _folder(path, prompt)
    if not path.exists():
        raise CorpusError(f"There is no {source!r}: name a folder of images or a parquet file (hub ids: not yet).")
    if path.suffix == ".parquet":
        return _parquet(path, [path], prompt)
    if path.suffix in _UNBUILT:
        raise CorpusError(f"{source} is not read yet ({_UNBUILT[path.suffix]}): name a folder of images or parquet.")
    raise CorpusError(f"{source} is no corpus: name a folder of images or a parquet file.")


def _folder(folder: Path, prompt: str) -> Corpus:
    described = _metadata(folder)
    names = sorted({str(path.relative_to(folder).as_posix()) for path in _images_in(folder)} | set(described))
    if not names:
        raise CorpusError(f"{folder} holds no image ({', '.join(SUFFIXES)}).")
    items = [
        CorpusItem(name, folder / name, _question(described.get(name, {}), index, prompt))
        for index, name in enumerate(names)
    ]
    return Corpus(str(folder), len(items), items)


def _images_in(folder: Path) -> list[Path]:
    hidden = (path for path in folder.rglob("*") if not any(p.startswith(".") for p in path.relative_to(folder).parts))
    return [path for path in hidden if path.suffix.lower() in SUFFIXES and path.is_file()]


def _parquet_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def _metadata(folder: Path) -> dict[str, Mapping[str, Any]]:
    """file name relative to `folder` -> its line in the metadata.jsonl beside it."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.rglob(METADATA)):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            told = _line(path, number, line) if line.strip() else None
            if told is not None:
                file = path.parent / told["file_name"]
                if not file.resolve().is_relative_to(folder.resolve()):
                    raise CorpusError(f"{path}, line {number}: {told['file_name']!r} lies outside the corpus.")
                found[file.relative_to(folder).as_posix()] = told
    return found


def _line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError:
        raise CorpusError(f"{path}, line {number}: this is not JSON.") from None
    if not isinstance(told, dict) or not isinstance(told.get("file_name"), str):
        raise CorpusError(f"{path}, line {number}: there is no file_name.")
    return told


def _question(told: Mapping[str, Any], index: int, default: str) -> str:
    """The question of an item: of its list the one whose turn it is, else its own, else the default."""
    questions = told.get("questions")
    if isinstance(questions, list) and questions:
        chosen = questions[index % len(questions)]
        return _question(chosen, index, default) if isinstance(chosen, dict) else str(chosen)
    own = [told[key] for key in _QUESTION_KEYS if isinstance(told.get(key), str) and told[key].strip()]
    return str(own[0]) if own else default


@dataclass(frozen=True)
class ParquetItems:
    """Rows of parquet files, read as they are asked for."""

    files: Sequence[Path]
    image_column: str
    default_prompt: str

    def __iter__(self) -> Iterator[CorpusItem]:
        for file in self.files:
            for index, row in enumerate(_rows(file, self.image_column)):
                image = row[self.image_column] or {}
                data = image.get("bytes") if isinstance(image, dict) else image
                name = f"{file.name}#{index:07d}"
                yield CorpusItem(name, data or b"", _question(row, index, self.default_prompt))


def _parquet(source: Path, files: Sequence[Path], prompt: str) -> Corpus:
    if len({file.name for file in files}) < len(files):
        raise CorpusError(f"{source} holds parquet files of the same name in different folders: give them other names.")
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    size, columns = 0, []
    for file in files:
        try:
            meta = pq.ParquetFile(file)
        except Exception as error:  # pyarrow raises many kinds
            raise CorpusError(f"{file} is not valid parquet: {error}.") from None
        size, columns = size + meta.metadata.num_rows, list(meta.schema_arrow.names)
    image = next((name for name in ("image", "images", "img") if name in columns), None)
    if image is None or not size:
        raise CorpusError(f"{source} has {size} rows and the columns {', '.join(columns)}; a column `image` is needed.")
    return Corpus(str(source), size, ParquetItems(files, image, prompt))


def _rows(file: Path, image_column: str) -> Iterator[dict[str, Any]]:
    from datasets import Image, load_dataset

    rows = load_dataset("parquet", data_files=[str(file)], split="train", streaming=True)
    if isinstance((rows.features or {}).get(image_column), Image):
        rows = rows.cast_column(image_column, Image(decode=False))  # encoded bytes: our own decoder refuses bad ones
    yield from rows
