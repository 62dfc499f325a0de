"""Drawn answers: those of transformers' own sampling, the same for the same seed, wherever the experts lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vismmoe.config import EngineConfig, InferConfig
from vismmoe.engine import Engine, Request
from vismmoe.errors import UsageError
from vismmoe.talk import sampling_line
from vismmoe.types import GREEDY, Sampling

TOP_K = 4
TOKENS = 8
WAYS = (Sampling(0.9, seed=5), Sampling(1.5, 0.8, seed=6), Sampling(3.0, top_k=7), Sampling(2.0, 0.95, 20, 2**63 - 1))


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), compute_dtype="float32")) as held:
        yield held


@pytest.fixture
def question(picture: Image.Image) -> Request:
    return Request((picture,), "What is this?", TOKENS)


@pytest.mark.parametrize("way", WAYS)
def test_a_draw_is_the_one_that_transformers_makes(
    tiny_checkpoint: Path, engine: Engine, question: Request, picture: Image.Image, way: Sampling
) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
    text = engine._processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = engine._processor(text=[text], images=[picture], return_tensors="pt")
    with torch.random.fork_rng():
        torch.manual_seed(way.seed)
        out = model.generate(
            **inputs, do_sample=True, max_new_tokens=TOKENS, temperature=way.temperature, top_p=way.top_p,
            top_k=way.top_k or 0,
        )  # fmt: skip
    theirs = engine._processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert engine.generate(replace(question, sampling=way)).text == theirs


def test_the_same_seed_gives_the_same_answer_resident_streamed_and_together(
    tiny_checkpoint: Path, question: Request, answer: Any, force_plan: Any
) -> None:
    drawn = [replace(question, sampling=way) for way in (*WAYS, Sampling(1.5, 0.8, seed=7))]
    config = EngineConfig(model=str(tiny_checkpoint))
    with Engine.load(config) as engine:
        resident = [answer(engine, request) for request in drawn]
        greedy = engine.generate(question).text
    force_plan(slabs=TOP_K, pinned_layers=1)
    with Engine.load(config) as engine:
        state = torch.get_rng_state()
        for request, wanted in zip(drawn, resident, strict=True):
            assert answer(engine, request).same_bits(wanted)
        together = [told.text for told in engine.generate_together([question, *drawn])]
        assert torch.equal(torch.get_rng_state(), state), "the process's own generator is left alone"
    assert together == [greedy, *(wanted.result.text for wanted in resident)]
    assert len(set(together)) > 3, "seeds and temperatures matter"


def test_one_token_to_draw_from_is_the_likeliest(engine: Engine, question: Request) -> None:
    greedy = engine.generate(question).text
    for way in (Sampling(5.0, top_k=1), Sampling(0.7, 1e-9), Sampling(0.01)):
        assert engine.generate(replace(question, sampling=way)).text == greedy


def test_a_checkpoint_cannot_switch_sampling_or_penalties_on(checkpoint_copy: Path, question: Request) -> None:
    said = {"do_sample": True, "temperature": 50.0, "repetition_penalty": 30.0, "num_beams": 3}
    with Engine.load(EngineConfig(model=str(checkpoint_copy))) as engine:
        wanted = engine.generate(question).text
    config = json.loads((checkpoint_copy / "config.json").read_text())
    (checkpoint_copy / "config.json").write_text(json.dumps({**config, **said}))
    (checkpoint_copy / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, **said}))
    with Engine.load(EngineConfig(model=str(checkpoint_copy))) as engine:
        assert engine.generate(question).text == wanted


def test_the_report_says_how_to_draw_the_answer_again(engine: Engine, question: Request) -> None:
    told = engine.generate(replace(question, sampling=Sampling(0.7, 0.9, None, 3))).to_json()["sampling"]
    assert Sampling(**told) == Sampling(0.7, 0.9, None, 3)
    assert sampling_line(told) == "temperature 0.7, top-p 0.9, seed 3"
    assert engine.generate(question).to_json()["sampling"] is None


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.001}, {"temperature": 101.0}, {"temperature": -0.5}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "top_k": 0}, {"temperature": 1.0, "seed": -1}, {"temperature": 1.0, "seed": 2**63},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_a_sentence(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        InferConfig(prompt="x", **asked)
    with pytest.raises(UsageError):
        Sampling(**asked)


@pytest.mark.parametrize("idle", [{"top_p": 0.9}, {"top_k": 5}, {"seed": 1}])
def test_a_flag_that_would_change_nothing_is_refused(idle: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="would change nothing"):
        InferConfig(prompt="x", **idle)


def test_flags_become_the_request_s_sampling() -> None:
    assert InferConfig(prompt="x").sampling() == GREEDY
    told = InferConfig(prompt="x", temperature=0.7, top_p=0.8, top_k=20, seed=9).sampling()
    assert told == Sampling(0.7, 0.8, 20, 9)
