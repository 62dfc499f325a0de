"""A prompt in pieces: the logits of the whole one within rounding, the same bits wherever experts lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request, plan_for
from vismmoe.errors import BudgetError, UsageError

TOP_K = 4
PREFIX = 2


@pytest.fixture(scope="module")
def requests(make_picture: Any) -> list[Request]:
    """All tokens, half of them, other counts kept, two images, none."""
    one, two = make_picture(96, 64), make_picture(48, 80, 1)
    return [
        Request((one,), "What is this?", 5),
        Request((one,), "What is this?", 5, 0.5, "affinity-bytes"),
        Request((one, two), "Which one?", 5, 0.7, "prompt"),
        Request((), "Say something.", 3),
    ]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    config = EngineConfig(model=str(tiny_checkpoint), prefix_layers=PREFIX, compute_dtype="float32")
    with Engine.load(config) as held:
        yield held


def close(one: Any, other: Any) -> None:
    assert one.result.text == other.result.text
    assert one.result.usage == other.result.usage
    for ours, theirs in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
def test_pieces_give_the_logits_of_the_whole(engine: Engine, requests: list[Request], answer: Any, chunk: int) -> None:
    rows: list[int] = []
    handle = engine.model.get_submodule("model.language_model.layers.4.mlp").register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[1])
    )
    for request in requests:
        whole = answer(engine, request)
        del rows[:]
        told = answer(engine, replace(request, prefill_chunk=chunk))
        close(told, whole)
        assert max(rows) <= chunk
        assert told.result.experts.distinct_in_prefill == whole.result.experts.distinct_in_prefill
        assert told.result.fallbacks == whole.result.fallbacks
    handle.remove()


def test_pieces_have_the_same_bits_resident_streamed_and_together(
    tiny_checkpoint: Path, requests: list[Request], answer: Any, force_plan: Any
) -> None:
    asked = [replace(request, prefill_chunk=chunk) for request, chunk in zip(requests, (7, 16, 5, 9), strict=True)]
    config = EngineConfig(model=str(tiny_checkpoint), prefix_layers=PREFIX)
    with Engine.load(config) as engine:
        resident = [answer(engine, request) for request in asked]
    force_plan(slabs=TOP_K, pinned_layers=PREFIX)
    with Engine.load(config) as engine:
        for request, wanted in zip(asked, resident, strict=True):
            told = answer(engine, request)
            assert told.same_bits(wanted)
            for phase in (told.result.experts.prefill, told.result.experts.decode):
                assert phase.accesses == phase.hits + phase.demand_loads
        together = engine.generate_together([*asked, requests[0]])
        alone = engine.generate(requests[0])
    assert [told.text for told in together] == [*(told.result.text for told in resident), alone.text]
    assert [told.usage for told in together] == [*(told.result.usage for told in resident), alone.usage]


def test_a_conversation_goes_on_in_pieces(engine: Engine, requests: list[Request]) -> None:
    whole, pieces = engine.converse(), engine.converse()
    for request in (requests[1], requests[3], requests[2]):
        wanted = whole.ask(request)
        told = pieces.ask(replace(request, prefill_chunk=6))
        assert (told.text, told.usage) == (wanted.text, wanted.usage)


@pytest.mark.parametrize("family", ["glm4v_moe", "qwen3_5_moe", "deepseek_vl_v2", "gpt_oss"])
def test_other_families_take_pieces_or_say_that_they_do_not(
    family: str, tmp_path: Path, make_family: Callable[[str, Path], Path], requests: list[Request], answer: Any
) -> None:
    folder = make_family(family, tmp_path)
    with Engine.load(EngineConfig(model=str(folder), compute_dtype="float32")) as engine:
        text_only = engine.checkpoint.family.vision is None
        for request in requests[3:] if text_only else (requests[0], replace(requests[2], compressor="random")):
            told = answer(engine, replace(request, prefill_chunk=8))
            close(told, answer(engine, request))
            assert any("as a whole" in note for note in told.result.fallbacks) == (family == "qwen3_5_moe")


def test_a_piece_of_nothing_and_recorded_pieces_are_refused(engine: Engine, requests: list[Request]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        engine.generate(replace(requests[0], prefill_chunk=0))
    with pytest.raises(UsageError, match="recorded"):
        engine.record(replace(requests[0], prefill_chunk=4))


def test_a_prompt_in_pieces_runs_where_the_whole_one_does_not_fit(tiny_checkpoint: Path) -> None:
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint), image_size=(32, 32), context=64))
    long = Request((), "What is this? " * 40, 2)
    config = EngineConfig(model=str(tiny_checkpoint), device_memory=plan.minimum_bytes + 1_800_000)
    with Engine.load(config, image_size=(32, 32), context_tokens=64) as engine:
        with pytest.raises(BudgetError, match="up to"):
            engine.generate(long)
        assert engine.generate(replace(long, prefill_chunk=32)).text
