"""From whatever holds a benchmark's data to its questions, in the benchmark's order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from vismmoe.errors import CorpusError
from vismmoe.evaluate.benchmarks import checked
from vismmoe.evaluate.forms.items import Item
from vismmoe.evaluate.forms.originals import read_mme, read_ocrbench, read_pope, read_textvqa
from vismmoe.evaluate.forms.tables import parquet_files, read_parquet, read_tsv
from vismmoe.evaluate.score import Benchmark

__all__ = ["Item", "chosen", "load_items"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_items(benchmark: Benchmark, source: str, images: str | None = None) -> list[Item]:
    """All questions. source: a folder, a file, or an id on the Hugging Face hub; images: folder of the pictures.

    Raises CorpusError, which names the line of a malformed row.
    """
    folders = [Path(images)] if images else []
    if images and not folders[0].is_dir():
        raise CorpusError(f"--images {images} is no folder.")
    place = Path(source)
    if not place.exists():
        if not _HUB_ID.fullmatch(source):
            raise CorpusError(f"--data {source} is not there: give a folder, a file, or an id of the Hugging Face hub.")
        place = _download(source)
    items = _read(benchmark, place, folders)
    if not items:
        raise CorpusError(f"{source} holds no question of {benchmark.title}.")
    return [replace(item, row=checked(benchmark, item.row, item.where)) for item in items]


def chosen(benchmark: Benchmark, items: list[Item], limit: int | None) -> list[Item]:
    """At most `limit` units, evenly spread: an image with its two questions, a question with its passes, or a row."""
    keys = [benchmark.unit(item.row) if benchmark.unit else str(place) for place, item in enumerate(items)]
    units = list(dict.fromkeys(keys))
    if limit is None or limit >= len(units):
        return items
    wanted = {units[place * len(units) // limit] for place in range(limit)}
    return [item for key, item in zip(keys, items, strict=True) if key in wanted]


def _read(benchmark: Benchmark, place: Path, folders: list[Path]) -> list[Item]:
    if place.suffix == ".tsv":
        return read_tsv(place, [*folders, place.parent])
    if place.suffix == ".parquet":
        return read_parquet([place])
    if place.is_dir():
        if files := parquet_files(benchmark, place):
            return read_parquet(files)
        tables = sorted(place.glob("*.tsv"))
        if len(tables) > 1:
            named = [file for file in tables if benchmark.name in file.name.lower()]
            tables = named or tables
        if len(tables) > 1:
            raise CorpusError(f"{place} holds several tables ({', '.join(f.name for f in tables)}): name one of them.")
        if tables:
            return read_tsv(tables[0], [*folders, place])
    return _original(benchmark, place, folders)


def _original(benchmark: Benchmark, place: Path, folders: list[Path]) -> list[Item]:
    if benchmark.name == "mme":
        return read_mme(place)
    if benchmark.name == "pope":
        return read_pope(place, folders)
    if benchmark.name == "ocrbench":
        return read_ocrbench(place, folders)
    if benchmark.name == "textvqa":
        return read_textvqa(place, folders)
    raise CorpusError(f"{place} holds neither a .tsv nor a .parquet file, the forms in which {benchmark.title} comes.")


def _download(hub_id: str) -> Path:
    """The data set's parquet files, in the hub's own cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=["*.parquet", "*.tsv"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{hub_id} is neither here nor to be had from the Hugging Face hub ({reason}).") from None
