"""Headers are believed only as far as the file bears them out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vismmoe.errors import CheckpointError
from vismmoe.models.headers import read_header, read_headers


def write(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(body) if length is None else length) + body + data)
    return file


def test_a_tensor_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.randn(4).bfloat16(), "c": torch.zeros(0, 2)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_headers(tmp_path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name].read(), tensor)


@pytest.mark.parametrize(
    ("header", "data", "told"),
    [
        (b"not json", b"", "damaged"),
        ([], b"", "no table"),
        ({"a": 3}, b"", "entry for a"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "entry for a"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"x", "type F4"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "contradicts"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "truncated"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234", "contradicts"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [1e999, 4]}}', b"1234", "damaged"),
        (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', b"1234", "damaged"),
        ({"a": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4]}}, b"1234", "contradicts"),
        (b"[" * 200_000, b"", "too deeply"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: bytes, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        read_header(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 2**63)])
def test_a_file_too_short_for_its_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="no whole safetensors"):
        read_header(tmp_path / "x.safetensors")


def test_a_file_cut_after_its_header_was_read_is_told(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000)}, tmp_path / "model.safetensors")
    entry = read_headers(tmp_path)["a"]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(entry.offset + 100)
    with pytest.raises(CheckpointError, match="truncated"):
        entry.read()


@pytest.mark.parametrize(
    ("index", "told"),
    [
        ("{", "cannot be used"),
        ({"metadata": {}}, "cannot be used"),
        ({"weight_map": {"a": "../away.safetensors"}}, "plain name"),
        ({"weight_map": {"a": "none.safetensors"}}, "missing"),
        ({"weight_map": {"a": "a\0b"}}, "plain name"),
        ({"weight_map": [1]}, "cannot be used"),
        ("[" * 200_000, "cannot be used"),
        ({"weight_map": {"b": "one.safetensors"}}, "says that b lies in"),
        ({"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}, "does not name, d"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, index: Any, told: str) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(1), "d": torch.zeros(1)}, tmp_path / "two.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=told):
        read_headers(tmp_path)
