"""Corpora of rows: parquet, webdataset, and data sets of the hub; the only file that imports Hugging Face `datasets`.

Nothing is decoded here: an item that turns out to be unreadable is the reader's business to skip.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe_training.corpus.folder import SUFFIXES
from vismmoe_training.corpus.items import Corpus, CorpusItem, question_of

IMAGE_COLUMNS = ("image", "images", "img", *(suffix.removeprefix(".") for suffix in SUFFIXES))


@dataclass(frozen=True)
class RowItems:
    """Rows of one or more tables, read as they are asked for."""

    tables: Sequence[tuple[str, Callable[[], Any]]]  # (name, opens a streaming data set)
    default_prompt: str

    def __iter__(self) -> Iterator[CorpusItem]:
        for name, open_rows in self.tables:
            for index, row in enumerate(_encoded(open_rows())):
                told = {**row, **row["json"]} if isinstance(row.get("json"), Mapping) else row
                own = f"{name}#{row.get('__key__', f'{index:07d}')}"
                yield CorpusItem(own, _image_bytes(row), question_of(told, index, self.default_prompt))


def open_parquet(source: Path, files: Sequence[Path], prompt: str) -> Corpus:
    """Rows of parquet files with a column `image`. Raises CorpusError for other files."""
    _refuse_namesakes(source, files)
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    size, columns = 0, []
    for file in files:
        try:
            meta = pq.ParquetFile(file)
        except Exception as error:  # pyarrow raises many kinds
            raise CorpusError(f"{file} is not valid parquet: {error}.") from None
        size, columns = size + meta.metadata.num_rows, list(meta.schema_arrow.names)
    if not size or not set(IMAGE_COLUMNS) & set(columns):
        raise CorpusError(f"{source} has {size} rows and the columns {', '.join(columns)}; a column `image` is needed.")
    return Corpus(str(source), size, RowItems([_table("parquet", file) for file in files], prompt))


def open_webdataset(source: Path, files: Sequence[Path], prompt: str) -> Corpus:
    """Samples of webdataset shards: files of one stem in a tar are one sample. Raises CorpusError for other files."""
    _refuse_namesakes(source, files)
    size = sum(_images_in_tar(file) for file in files)
    if not size:
        raise CorpusError(f"{source} holds no image ({', '.join(SUFFIXES)}).")
    return Corpus(str(source), size, RowItems([_table("webdataset", file) for file in files], prompt))


def open_hub(source: str, prompt: str) -> Corpus:
    """A data set of the hub: `org/name`, or `org/name:split` (without: train, else its first). CorpusError without."""
    from datasets import load_dataset, load_dataset_builder

    name, _, split = source.partition(":")
    try:
        builder = load_dataset_builder(name)
        splits = builder.info.splits or {}
        split = split or ("train" if "train" in splits or not splits else next(iter(splits)))
        rows = load_dataset(name, split=split, streaming=True)
    except Exception as error:  # the hub's client raises many kinds, among them those of its network library
        raise CorpusError(
            f"There is no {source!r} on this disk, and no data set of this name could be opened on the hub: "
            f"{' '.join(str(error).split())[:300]}"
        ) from None
    size = splits[split].num_examples if split in splits else None
    return Corpus(source, size or None, RowItems([(f"{name}:{split}", lambda: rows)], prompt))


def _table(form: str, file: Path) -> tuple[str, Callable[[], Any]]:
    def open_rows() -> Any:
        from datasets import load_dataset

        return load_dataset(form, data_files=[str(file)], split="train", streaming=True)

    return file.name, open_rows


def _encoded(rows: Any) -> Iterator[dict[str, Any]]:
    """The rows with their images as encoded bytes: our own decoder refuses bad ones, and an item is not a run."""
    from datasets import Image

    for column, feature in (rows.features or {}).items():
        if isinstance(feature, Image):
            rows = rows.cast_column(column, Image(decode=False))
    yield from rows


def _image_bytes(row: Mapping[str, Any]) -> bytes:
    """The first image of a row; no bytes where it has none, which the reader will name as unreadable."""
    value = next((row[name] for name in IMAGE_COLUMNS if row.get(name)), None)
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, Mapping):
        value = value.get("bytes") or _bytes_at(value.get("path"))
    return value if isinstance(value, bytes) else b""


def _bytes_at(path: object) -> bytes:
    """Image folders of the hub name files (hf://..., or paths where they are stored); a file that is gone is empty."""
    import fsspec  # type: ignore[import-untyped]  # comes with `datasets`, which opens files through it

    if not isinstance(path, str):
        return b""
    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except (OSError, ValueError):
        return b""


def _images_in_tar(file: Path) -> int:
    """Samples with an image."""
    try:
        with tarfile.open(file) as tar:  # only its table of contents is read, nothing is unpacked
            names = [Path(member.name) for member in tar if member.isfile()]
    except (OSError, tarfile.TarError) as error:
        raise CorpusError(f"{file} is not a tar file: {error}.") from None
    return len({name.with_suffix("") for name in names if name.suffix.lower() in SUFFIXES})


def _refuse_namesakes(source: Path, files: Sequence[Path]) -> None:
    if len({file.name for file in files}) < len(files):
        raise CorpusError(f"{source} holds files of the same name in different folders: give them other names.")
