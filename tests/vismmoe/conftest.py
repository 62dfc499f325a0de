"""Running an engine and looking at the logits behind its answer."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vismmoe.engine as engine_module
from vismmoe.engine import Engine, Request
from vismmoe.experts.plan import MemoryPlan
from vismmoe.experts.store import ExpertStore
from vismmoe.models.catalogue import FAMILIES
from vismmoe.request import GenerationResult

TESTS = Path(__file__).parent
BUILDERS = TESTS.parents[1] / "benchmarks" / "families"


@dataclass(frozen=True)
class Answer:
    """A result and the logits (1, V) of each forward's last token."""

    result: GenerationResult
    logits: tuple[Tensor, ...]

    def same_bits(self, other: Answer) -> bool:
        equal = len(self.logits) == len(other.logits) and all(map(torch.equal, self.logits, other.logits))
        return equal and self.result.text == other.result.text


@pytest.fixture(scope="session")
def answer() -> Callable[[Engine, Request], Answer]:
    def run(engine: Engine, request: Request) -> Answer:
        logits: list[Tensor] = []
        model: Any = engine._model
        handle = model.register_forward_hook(lambda module, args, output: logits.append(output.logits[0, -1:].clone()))
        try:
            return Answer(engine.generate(request), tuple(logits))
        finally:
            handle.remove()

    return run


@pytest.fixture
def force_plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """force_plan(slabs=1, pinned_layers=2): engines loaded afterwards get these, whatever the budget."""

    def force(**changes: Any) -> None:
        original = engine_module.plan_sizes

        def plan(*args: Any) -> MemoryPlan:
            return replace(original(*args), **changes)

        monkeypatch.setattr(engine_module, "plan_sizes", plan)

    return force


@pytest.fixture(scope="session")
def make_family() -> Callable[[str, Path], Path]:
    """make_family(model_type, folder): a tiny random checkpoint in the family's published layout."""

    def make(name: str, folder: Path) -> Path:
        if name == "deepseek_vl_v2":
            return TESTS / "models" / "deepseek_vl2" / "vectors" / "base"
        sys.path.insert(0, str(BUILDERS))
        try:
            import tiny
        finally:
            sys.path.remove(str(BUILDERS))
        tiny.build(FAMILIES[name], folder)
        return folder

    return make


@pytest.fixture
def slow_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read takes up to 3 ms, at random."""
    read = ExpertStore.read_batch
    chance = random.Random(0)

    def slow(self: ExpertStore, items: Sequence[Any], paced: bool = True) -> None:
        time.sleep(chance.random() * 3e-3)
        read(self, items, paced)

    monkeypatch.setattr(ExpertStore, "read_batch", slow)
