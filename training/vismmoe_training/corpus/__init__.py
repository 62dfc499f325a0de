"""Images with questions: from a folder, parquet, webdataset, LLaVA or COCO json, or the hub."""

from __future__ import annotations

import re
from pathlib import Path

from vismmoe.errors import CorpusError
from vismmoe_training.corpus.folder import METADATA, images_in, open_folder
from vismmoe_training.corpus.items import Corpus, CorpusItem
from vismmoe_training.corpus.listed import open_listed
from vismmoe_training.corpus.tables import open_hub, open_parquet, open_webdataset

__all__ = ["METADATA", "Corpus", "CorpusItem", "open_corpus"]

FORMS = "a folder of images, parquet, webdataset (.tar), LLaVA or COCO json (.json, .jsonl), or a hub id (org/name)"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")


def open_corpus(source: str, prompt: str, images: Path | None = None) -> Corpus:
    """The corpus at `source`; `prompt` is asked where it has no question of its own.

    `images` says where the files that a json names lie. Raises CorpusError when there is nothing there or no image in
    it.
    """
    path = Path(source)
    if path.is_dir():
        return _open_folder(path, prompt)
    if not path.exists():
        if HUB_ID.fullmatch(source) and path.suffix not in (".json", ".jsonl", ".parquet", ".tar"):
            return open_hub(source, prompt)
        raise CorpusError(f"There is no {source!r}: name {FORMS}.")
    if path.suffix == ".parquet":
        return open_parquet(path, [path], prompt)
    if path.suffix == ".tar":
        return open_webdataset(path, [path], prompt)
    if path.suffix in (".json", ".jsonl"):
        return open_listed(path, prompt, images)
    raise CorpusError(f"{source} is no corpus: name {FORMS}.")


def _open_folder(folder: Path, prompt: str) -> Corpus:
    """Images where there are some, else the tables that the folder holds."""
    if not images_in(folder):
        for suffix, opened in ((".parquet", open_parquet), (".tar", open_webdataset)):
            files = sorted(folder.rglob(f"*{suffix}"))
            if files:
                return opened(folder, files, prompt)
    return open_folder(folder, prompt)
