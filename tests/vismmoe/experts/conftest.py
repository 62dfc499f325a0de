"""A checkpoint of random bytes, and masters that are slow or fail on purpose."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from vismmoe.errors import CheckpointError
from vismmoe.types import ExpertId, ExpertLayout, ExpertRange, PartShape


@dataclass
class Masters:
    """A layout over real files, and what each expert's bytes are."""

    layout: ExpertLayout
    truth: dict[ExpertId, bytes]
    files: list[Path]


@pytest.fixture
def make_masters(tmp_path: Path) -> Callable[..., Masters]:
    """Write layers x experts of parts (rows, 16) transposed and (8, rows), packed as published checkpoints are.

    `lead` bytes stand before the first expert of each file, and there is one file a layer.
    """

    def make(
        layers: int = 2,
        experts: int = 4,
        lead: int = 123,
        rows: int = 24,
        dtype: torch.dtype = torch.bfloat16,
        folder: Path = tmp_path,
    ) -> Masters:
        parts = (PartShape("gate_up_proj", (rows, 16), True), PartShape("down_proj", (8, rows), False))
        sizes = [16 * rows * dtype.itemsize, 8 * rows * dtype.itemsize]
        ranges: dict[ExpertId, tuple[ExpertRange, ...]] = {}
        truth: dict[ExpertId, bytes] = {}
        files = []
        for layer in range(layers):
            content = random.Random(layer).randbytes(lead + experts * sum(sizes) + 77)
            path = folder / f"model-{layer}.safetensors"
            path.write_bytes(content)
            files.append(path)
            for expert in range(experts):
                up = ExpertRange(path, lead + expert * sizes[0], sizes[0])
                down = ExpertRange(path, lead + experts * sizes[0] + expert * sizes[1], sizes[1])
                ranges[ExpertId(layer, expert)] = (up, down)
                truth[ExpertId(layer, expert)] = b"".join(content[r.offset : r.offset + r.length] for r in (up, down))
        return Masters(ExpertLayout(dtype, parts, ranges, sum(sizes)), truth, files)

    return make


@dataclass
class FakeStore:
    """Fills a slab with its expert's pattern, once `gate` is open, in `delay_s`; fails for `broken`; notes reads."""

    delay_s: float = 0.0
    broken: set[ExpertId] = field(default_factory=set)
    error: Exception = field(default_factory=lambda: CheckpointError("the disk is gone"))
    gate: threading.Event = field(default_factory=threading.Event)
    started: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    batches: list[tuple[str, list[ExpertId]]] = field(default_factory=list)

    def read_batch(self, items: Sequence[tuple[ExpertId, memoryview]]) -> None:
        self.batches.append((threading.current_thread().name, [expert for expert, _ in items]))
        self.started.release()
        assert self.gate.wait(600)
        threading.Event().wait(self.delay_s)
        for expert, slab in items:
            slab[: len(slab) // 2] = self.pattern(expert, len(slab) // 2)
            if expert in self.broken:
                raise self.error
            slab[len(slab) // 2 :] = self.pattern(expert, len(slab) - len(slab) // 2)

    @staticmethod
    def pattern(expert: ExpertId, length: int) -> bytes:
        return bytes([(expert.layer * 64 + expert.expert) % 251]) * length

    @property
    def order(self) -> list[ExpertId]:
        """Experts in the order in which their reads began."""
        return [expert for _, batch in self.batches for expert in batch]


@pytest.fixture
def fake_store() -> Iterator[Callable[..., FakeStore]]:
    """Make a FakeStore; `shut=True` lets no read end before gate.set()."""
    made: list[FakeStore] = []

    def make(shut: bool = False, **options: object) -> FakeStore:
        store = FakeStore(**options)  # type: ignore[arg-type]
        if not shut:
            store.gate.set()
        made.append(store)
        return store

    yield make
    for store in made:
        store.gate.set()


@pytest.fixture
def plain_layout() -> Callable[[int], ExpertLayout]:
    """A layout of experts of so many bytes, for pools whose bytes come from a FakeStore."""

    def make(expert_bytes: int = 64) -> ExpertLayout:
        return ExpertLayout(torch.uint8, (PartShape("weight", (expert_bytes,), False),), {}, expert_bytes)

    return make
