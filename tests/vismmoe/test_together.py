"""Requests that are answered together give the bits that each gives alone, and share what is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, GenerationResult, Request, plan_for
from vismmoe.errors import BudgetError, CheckpointError
from vismmoe.experts.store import ExpertStore
from vismmoe.metrics import PhaseCounters
from vismmoe.predictors.next_gate import NextGate

LAYERS, EXPERTS, TOP_K = 6, 16, 4


@pytest.fixture(scope="module")
def requests(make_picture: Callable[..., Image.Image]) -> list[Request]:
    """Unlike in all that may differ: images, lengths, kept tokens, compressors; one without an image."""
    return [
        Request((make_picture(64, 48),), "What is this?", 8),
        Request((make_picture(96, 64, 1),), "How many?", 3),
        Request((make_picture(64, 48, 2),), "What colour is it?", 8, 0.5, "affinity"),
        Request((), "Say something.", 5),
        Request((make_picture(32, 96, 3), make_picture(48, 48, 4)), "Which one?", 6, 0.7, "random"),
    ]


@pytest.fixture
def logits(tiny_checkpoint: Path) -> Iterator[Callable[[Engine], dict[tuple[int, ...], list[Tensor]]]]:
    """Notes the logits of every forward by the prompt that they belong to."""
    handles = []

    def watch(engine: Engine) -> dict[tuple[int, ...], list[Tensor]]:
        found: dict[tuple[int, ...], list[Tensor]] = {}
        model: Any = engine._model

        def note(module: Any, args: Any, output: Any) -> None:
            session = engine._here.session
            assert session is not None
            key = tuple(session.prompt.inputs["input_ids"][0].tolist()), session.keep_count
            found.setdefault(key, []).append(output.logits[0, -1:].clone())

        handles.append(model.register_forward_hook(note))
        return found

    yield watch
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_each_answer_has_the_bits_it_has_alone(
    tiny_checkpoint: Path, requests: list[Request], logits: Any, force_plan: Any, compute_dtype: Any
) -> None:
    config = EngineConfig(model=str(tiny_checkpoint), compute_dtype=compute_dtype)
    with Engine.load(config) as engine:
        wanted = logits(engine)
        alone = [engine.generate(request) for request in requests]
    force_plan(slabs=11, pinned_layers=1)
    with Engine.load(config) as plain:
        gate = NextGate(plain.spec, plain.routers, plain.router_norms, 3)
    with Engine.load(config, gate) as engine:
        found = logits(engine)
        together = engine.generate_together(requests)
        assert engine.generate(requests[0]).text == alone[0].text, "alone again, after the others"
    assert [told.text for told in together] == [told.text for told in alone]
    assert [told.usage for told in together] == [told.usage for told in alone]
    assert [told.experts.distinct_in_prefill for told in together] == [t.experts.distinct_in_prefill for t in alone]
    for key, bits in wanted.items():
        assert all(map(torch.equal, bits, found[key])), key
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vismmoe-turn")]


def test_an_expert_is_loaded_once_a_layer_for_all_of_them(
    tiny_checkpoint: Path, picture: Image.Image, force_plan: Any
) -> None:
    """The same question six times needs what one needs: slabs hold one layer, so nothing survives from one forward to
    the next, and all that differs is how often it is read."""
    force_plan(slabs=EXPERTS, pinned_layers=1)
    request = Request((picture,), "What is this?", 6)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        one = engine.generate(request)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        six = engine.generate_together([request] * 6)
    assert sum(traffic(told).bytes_loaded for told in six) == traffic(one).bytes_loaded
    assert [traffic(told).accesses for told in six] == [traffic(one).accesses] * 6
    for told in six:
        seen = traffic(told)
        assert seen.accesses == seen.hits + seen.demand_loads
    assert [traffic(told).demand_loads for told in six[1:]] == [0] * 5


def test_together_they_must_fit_the_budget(tiny_checkpoint: Path, picture: Image.Image) -> None:
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint), image_size=(64, 48), context=64))
    config = EngineConfig(model=str(tiny_checkpoint), device_memory=plan.minimum_bytes)
    request = Request((picture,), "What is this?", 8)
    with Engine.load(config, image_size=(64, 48), context_tokens=64) as engine:
        text = engine.generate(request).text
        with pytest.raises(BudgetError, match="these 4 requests have up to"):
            engine.generate_together([request] * 4)
        assert engine.generate(request).text == text


def test_a_failing_disk_ends_all_of_them_and_the_engine_goes_on(
    tiny_checkpoint: Path, requests: list[Request], force_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_plan(slabs=TOP_K, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        wanted = [told.text for told in engine.generate_together(requests)]
        read, left = ExpertStore.read_batch, [40]

        def failing(*args: Any) -> list[int]:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("no such luck")
            return read(*args)

        with monkeypatch.context() as patch:
            patch.setattr(ExpertStore, "read_batch", failing)
            with pytest.raises(CheckpointError, match="no such luck"):
                engine.generate_together(requests)
        assert [told.text for told in engine.generate_together(requests)] == wanted


def test_an_interruption_leaves_no_thread_behind(
    tiny_checkpoint: Path, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(EngineConfig(model=str(tiny_checkpoint)))
    calls = iter(range(100))
    run = engine._pipeline.run_together

    def interrupted(*args: Any) -> Any:
        if next(calls) == 9:
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(engine._pipeline, "run_together", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate_together(requests)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vismmoe-")]


def test_one_request_together_is_that_request(tiny_checkpoint: Path, requests: list[Request]) -> None:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        assert engine.generate_together([]) == []
        (told,) = engine.generate_together(requests[:1])
        assert told.text == engine.generate(requests[0]).text


def traffic(told: GenerationResult) -> PhaseCounters:
    return replace(told.experts.prefill + told.experts.decode, stall_ms=0.0)
