"""One question of a benchmark as it was read, and where its picture waits until it is needed."""

from __future__ import annotations

import base64
import binascii
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe.evaluate.score import Row

OpenImage = Callable[[], "bytes | Path"]
REFERENCE_CHARACTERS = 64  # a text at most so long in place of a picture names another row (VLMEvalKit)


@dataclass(frozen=True)
class Item:
    """A row without its picture, and how to get that."""

    where: str  # for messages: file and line
    row: Row
    image: OpenImage | None


class Spool:
    """Keeps pictures out of memory: they wait in one unnamed temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="vismmoe-")  # noqa: SIM115

    def put(self, data: bytes) -> OpenImage:
        """Returns how to get the bytes back."""
        offset = self._file.seek(0, 2)
        self._file.write(data)

        def get() -> bytes:
            self._file.seek(offset)
            return self._file.read(len(data))

        return get


def picture_bytes(value: Any, where: str) -> bytes | None:
    """The bytes of a table's cell: bytes, {bytes, path} as Hugging Face writes it, or base64 text; None: empty."""
    if isinstance(value, dict):
        value = value.get("bytes")
    if value is None or value == "":
        return None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, str):
        try:
            return base64.b64decode(value.split(",", 1)[1] if value.startswith("data:") else value, validate=False)
        except (binascii.Error, ValueError):
            raise CorpusError(f"{where}: the picture is no base64 text (it starts with {value[:20]!r}).") from None
    raise CorpusError(f"{where}: the picture is neither bytes nor base64 text but {type(value).__name__}.")


def file_in(folders: list[Path], name: str, where: str) -> OpenImage:
    """The file `name` in the first folder that has it. CorpusError names the row when none has."""
    if not name or ".." in Path(name).parts or Path(name).is_absolute():
        raise CorpusError(f"{where}: {name!r} is no name of a picture within the data.")
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        looked = ", ".join(map(str, folders)) or "no folder"
        raise CorpusError(f"{where}: the picture {name} is not in {looked}. Name its folder with --images.")
    path = found
    return lambda: path
