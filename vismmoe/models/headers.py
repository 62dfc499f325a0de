"""safetensors headers: where each tensor of a checkpoint lies, without touching its bytes.

Format: 8 bytes little-endian header length, JSON header, data. Offsets in the JSON count from the data's start.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vismmoe.errors import CheckpointError
from vismmoe.untrusted import parse_json, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `length` bytes at absolute byte `offset` of `file`."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    length: int

    def read(self) -> torch.Tensor:
        """The tensor, in memory of its own. CheckpointError when the file has shrunk since."""
        raw = torch.empty(self.length, dtype=torch.uint8)
        with self.file.open("rb", buffering=0) as file:
            read_exactly(file.fileno(), raw, self.offset, self.file)
        return raw.view(self.dtype).view(self.shape)


def read_exactly(descriptor: int, target: torch.Tensor, offset: int, file: Path) -> None:
    """Fill `target` (uint8, one dimension) from `offset`; CheckpointError names a file that ends too early."""
    view = target.numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{file} ends at byte {offset + done}: the checkpoint is truncated, fetch it again")
        done += count


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of the checkpoint in `folder` by name, from one file or from the files that its index names."""
    index = folder / INDEX
    if not index.is_file():
        return read_header(_single(folder))
    weight_map = _weight_map(index)
    files = {name: read_header(folder / name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, TensorEntry] = {}
    for tensor, file in weight_map.items():
        if tensor not in files[file]:
            raise CheckpointError(f"{index} says that {tensor} lies in {file}, but it does not")
        tensors[tensor] = files[file][tensor]
    stray = sorted(name for held in files.values() for name in held if name not in tensors)
    if stray:
        raise CheckpointError(f"{folder} holds tensors that {INDEX} does not name, {stray[0]} among {len(stray)}")
    return tensors


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file; every range is checked to lie inside the file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size + 1
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(f"{file} is no whole safetensors file: its header would take {length} bytes")
            header = parse_json(handle.read(length))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from None
    except ValueError as error:
        raise CheckpointError(f"{file} has a damaged safetensors header ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a damaged safetensors header (no table of tensors)")
    header.pop("__metadata__", None)
    return {name: _entry(name, value, file, 8 + length, size) for name, value in header.items()}


def _entry(name: str, value: object, file: Path, start: int, size: int) -> TensorEntry:
    try:
        if not isinstance(value, dict):
            raise TypeError
        shape = tuple(int(side) for side in value["shape"])
        first, last = (int(edge) for edge in value["data_offsets"])
        kind = str(value["dtype"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise CheckpointError(f"{file}: the header's entry for {name} is damaged") from None
    dtype = DTYPES.get(kind)
    if dtype is None:
        raise CheckpointError(
            f"{file}: {name} is of type {kind}, which is not run; use a float16, bfloat16 or float32 one"
        )
    if last - first != math.prod(shape) * dtype.itemsize or first < 0 or any(side < 0 for side in shape):
        raise CheckpointError(f"{file}: {name} has {last - first} bytes, which its shape {list(shape)} contradicts")
    if start + last > size:
        raise CheckpointError(
            f"{file} has {size} bytes but {name} ends at byte {start + last}: truncated, fetch it again"
        )
    return TensorEntry(name, file, dtype, shape, start + first, last - first)


def _single(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".ckpt"))
    if found:
        raise CheckpointError(f"{folder} holds {found[0]}: only safetensors checkpoints are read, convert it first")
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json(index)["weight_map"]
        pairs = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except ValueError as error:
        raise CheckpointError(f"{index} cannot be used ({error})") from None
    except (KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} cannot be used (it has no weight_map from tensors to files)") from None
    for file in set(pairs.values()):
        if Path(file).name != file or not file.isprintable():  # never outside the folder
            raise CheckpointError(f"{index} names the file {file!r}, which is not a plain name in its folder")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index} names {file}, which is missing in {index.parent}")
    return pairs
