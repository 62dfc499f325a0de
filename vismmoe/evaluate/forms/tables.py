"""Benchmarks as tables: VLMEvalKit's TSV, and parquet as on the Hugging Face hub."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe.evaluate.forms.items import REFERENCE_CHARACTERS, Item, OpenImage, Spool, file_in, picture_bytes
from vismmoe.evaluate.score import Benchmark, Row

# The split that is scored, by benchmark: the first that a folder has.
SPLITS = {
    "mme": (("test",),),
    "mmbench": (("dev",), ("validation",)),
    "pope": (("test",), ("adversarial", "popular", "random")),
    "ocrbench": (("test",),),
    "textvqa": (("validation",), ("val",)),
}
LANGUAGE = "en"  # of MMBench's folders en, cn and cc
IMAGE_COLUMNS = ("image", "image_path")


def read_tsv(file: Path, images: Sequence[Path]) -> list[Item]:
    """Rows with a picture of their own, with the index of the row that holds it, or with the name of a file.

    Cells may be of any size, and option texts such as None or NA stay texts; an empty cell is a missing value.
    """
    csv.field_size_limit(sys.maxsize)
    spool = Spool()
    rows: list[tuple[str, Row, str]] = []
    own: dict[str, OpenImage] = {}
    for line, row in _tsv_rows(file):
        where = f"{file.name}, line {line}"
        cell = str(row.get("image") or "")
        index = str(row.get("index", len(rows)))
        if len(cell) > REFERENCE_CHARACTERS:
            data = picture_bytes(cell, where)
            assert data is not None
            own[index] = spool.put(data)
            cell = index
        rows.append((where, {name: value for name, value in row.items() if name != "image"}, cell))
    return [Item(where, row, _tsv_image(where, row, cell, own, images)) for where, row, cell in rows]


def _tsv_image(where: str, row: Row, cell: str, own: dict[str, OpenImage], images: Sequence[Path]) -> OpenImage | None:
    if cell in own:
        return own[cell]
    if cell.endswith(".0") and cell[:-2] in own:  # a table that pandas wrote: its indices have become floats
        return own[cell[:-2]]
    name = str(row.get("image_path") or "")
    if name and (images or not cell):
        return file_in([*images], name, where)
    if cell:
        raise CorpusError(f"{where}: the picture is that of row {cell}, which the table does not hold.")
    return None


def _tsv_rows(file: Path) -> Iterator[tuple[int, Row]]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.reader(stream, delimiter="\t")
            head = next(reader, None)
            if not head:
                raise CorpusError(f"{file} is empty: the first line must name the columns.")
            line = reader.line_num + 1
            for cells in reader:
                if len(cells) != len(head):
                    raise CorpusError(f"{file.name}, line {line}: {len(cells)} cells where the head has {len(head)}.")
                yield line, {name: cell if cell != "" else None for name, cell in zip(head, cells, strict=True)}
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise CorpusError(f"{file} is not UTF-8 text (byte {error.start}).") from None
    except csv.Error as error:
        raise CorpusError(f"{file} is no table of tab-separated values ({error}).") from None


def read_parquet(files: Sequence[Path]) -> list[Item]:
    """All rows of these files, in their order."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        raise CorpusError("reading parquet needs pyarrow: pip install 'vismmoe[train]'.") from None
    spool = Spool()
    items = []
    for file in files:
        try:
            table = parquet.ParquetFile(file)
            place = 0
            for batch in table.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    place += 1
                    items.append(_parquet_item(row, f"{file.name}, row {place}", spool))
        except (pyarrow.ArrowException, OSError) as error:
            raise CorpusError(f"{file} cannot be read as parquet ({error}).") from None
    return items


def _parquet_item(row: dict[str, Any], where: str, spool: Spool) -> Item:
    value = row.pop("image", None)
    data = picture_bytes(value, where)
    if isinstance(value, dict) and value.get("path") and not row.get("image_path"):
        row["image_path"] = value["path"]
    return Item(where, row, spool.put(data) if data is not None else None)


def parquet_files(benchmark: Benchmark, folder: Path) -> list[Path]:
    """The files of the split that is scored; all files where no name tells a split."""
    every = sorted(folder.rglob("*.parquet"))
    if benchmark.name == "mmbench":
        every = [file for file in every if file.parent.name == LANGUAGE] or every
    for splits in SPLITS[benchmark.name]:
        found = [file for split in splits for file in every if file.name.split("-")[0].split(".")[0] == split]
        default = [file for file in found if file.parent.name in ("data", "default")]
        if found:
            return default or found
    return every
