"""Several turns on one cache: the answers of the whole conversation asked at once, wherever experts lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request, plan_for
from vismmoe.errors import BudgetError, CheckpointError, UsageError
from vismmoe.experts.store import ExpertStore
from vismmoe.request import Message, Picture
from vismmoe.types import Sampling

TOP_K = 4
TOKENS = 6


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), prefix_layers=2, compute_dtype="float32")) as held:
        yield held


@pytest.fixture(scope="module")
def turns(make_picture: Any) -> list[Request]:
    """With an image, without, with two new ones, without."""
    return [
        Request((make_picture(64, 48),), "What is this?", TOKENS),
        Request((), "And what else?", TOKENS),
        Request((make_picture(32, 80, 1), make_picture(48, 48, 2)), "Which one is larger?", TOKENS),
        Request((), "Why?", TOKENS),
    ]


def at_once(turns: list[Request], answers: list[str]) -> Request:
    """The last turn as a request of its own, the answered ones before it as its history."""
    history: list[Message] = []
    for turn, answer in zip(turns, answers, strict=False):
        history += [*turn.messages, Message("assistant", (answer,))]
    return replace(turns[len(answers)], history=tuple(history))


@contextmanager
def watched(engine: Engine) -> Iterator[list[Any]]:
    """The logits (1, V) of each forward's last token."""
    logits: list[Any] = []
    handle = engine.model.register_forward_hook(lambda module, args, out: logits.append(out.logits[0, -1:].clone()))
    yield logits
    handle.remove()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(2.0, 0.9, seed=4)])
def test_each_answer_is_that_of_the_whole_conversation_asked_at_once(
    engine: Engine, turns: list[Request], answer: Any, sampling: Sampling
) -> None:
    talk, said = engine.converse(), []
    for number, turn in enumerate(replace(turn, sampling=sampling) for turn in turns):
        at_once_ = answer(engine, replace(at_once(turns, said), sampling=sampling))
        with watched(engine) as logits:
            told = talk.ask(turn)
        assert told.text == at_once_.result.text
        for ours, wanted in zip(logits, at_once_.logits, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
        usage, whole = told.usage, at_once_.result.usage
        assert replace(usage, cached_tokens=0) == whole
        assert (usage.cached_tokens > 0) == (number > 0)
        said.append(told.text)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_wherever_experts_lie_a_conversation_has_the_same_bits(
    tiny_checkpoint: Path, turns: list[Request], answer: Any, force_plan: Any, ratio: float
) -> None:
    asked = [replace(turn, keep_ratio=ratio) for turn in turns]

    def talk_through(engine: Engine) -> list[Any]:
        talk = engine.converse()
        with watched(engine) as logits:
            texts = [talk.ask(turn).text for turn in asked]
        return [*texts, *logits]

    config = EngineConfig(model=str(tiny_checkpoint), prefix_layers=2)
    with Engine.load(config) as engine:
        resident = talk_through(engine)
        engine.generate(asked[0])
        again = talk_through(engine)
    force_plan(slabs=TOP_K, pinned_layers=2)
    with Engine.load(config) as engine:
        streamed = talk_through(engine)
    for other in (again, streamed):
        assert other[: len(asked)] == resident[: len(asked)]
        assert all(map(torch.equal, other[len(asked) :], resident[len(asked) :]))


def test_dropped_tokens_stay_dropped_in_later_turns_and_kept_ones_keep_their_places(
    engine: Engine, tiny_checkpoint: Path, turns: list[Request]
) -> None:
    """The independent computation runs transformers' model over all turns at once, and hides what was dropped."""
    asked = [replace(turn, keep_ratio=0.5, compressor="random") for turn in turns[:3]]
    talk = engine.converse()
    with watched(engine) as logits:
        told = [talk.ask(turn) for turn in asked]
    assert [each.usage.kept_visual_tokens for each in told] == [6, 6, 6 + told[2].usage.visual_tokens // 2 - 6]
    kept = talk._kept
    assert kept is not None
    ids = talk._ids
    assert len(ids) - len(kept) == told[2].usage.visual_tokens - told[2].usage.kept_visual_tokens
    wanted = _hidden_logits(engine, tiny_checkpoint, talk, kept)
    torch.testing.assert_close(logits[-1], wanted, rtol=1e-4, atol=1e-4)


def _hidden_logits(engine: Engine, folder: Path, talk: Any, kept: Any) -> Any:
    """(1, V) after the last token in the conversation's cache."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    ids = torch.tensor([talk._ids])
    images = engine._processor.image_processor(images=list(talk.images), return_tensors="pt")
    dropped = torch.ones(len(talk._ids), dtype=torch.bool)
    dropped[kept] = False

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rows = args[0].shape[1]
        mask = torch.zeros(rows, rows).masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -torch.inf)
        mask[:, dropped] = -torch.inf
        return args, {**kwargs, "attention_mask": mask.fill_diagonal_(0)[None, None]}

    for layer in model.model.language_model.layers[2:]:
        layer.register_forward_pre_hook(hide, with_kwargs=True)
    kinds = (ids == model.config.image_token_id).int()
    with torch.inference_mode():
        return model(input_ids=ids, mm_token_type_ids=kinds, **images).logits[0, -1:]


@pytest.mark.parametrize("family", ["glm4v_moe", "qwen3_5_moe", "deepseek_vl_v2", "gpt_oss"])
def test_every_kind_of_family_goes_on_where_it_was(
    family: str, tmp_path: Path, make_family: Callable[[str, Path], Path], turns: list[Request]
) -> None:
    """Positions in three axes, a running state, images cut into tiles, sliding windows."""
    folder = make_family(family, tmp_path)
    with Engine.load(EngineConfig(model=str(folder), compute_dtype="float32")) as engine:
        text_only = engine.checkpoint.family.vision is None
        # Random answers are no text: written again they are other tokens, which not every cache can be cut to.
        tokens = 1 if family in ("qwen3_5_moe", "gpt_oss") else TOKENS
        asked = [replace(turn, images=() if text_only else turn.images, max_new_tokens=tokens) for turn in turns]
        for ratio in (1.0,) if text_only else (1.0, 0.5):
            talk, said = engine.converse(), []
            for number, turn in enumerate(asked):
                told = talk.ask(replace(turn, keep_ratio=ratio, compressor="random"))
                assert (told.usage.cached_tokens > 0) == (number > 0)
                if ratio == 1:
                    assert told.text == engine.generate(at_once(asked, said)).text
                said.append(told.text)


def test_a_template_that_rewrites_earlier_turns_costs_time_and_changes_no_answer(
    checkpoint_copy: Path, turns: list[Request]
) -> None:
    """As those of thinking models do: only the last answer is shown whole."""
    template = checkpoint_copy / "chat_template.jinja"
    template.write_text(template.read_text().replace(
        "{{ part['text'] }}", "{{ part['text'] if message['role'] == 'user' or loop.last and false else 'Yes.' }}"
    ))  # fmt: skip
    with Engine.load(EngineConfig(model=str(checkpoint_copy), compute_dtype="float32")) as engine:
        talk, said = engine.converse(), []
        for ratio in (1.0, 0.5):
            for turn in turns:
                told = talk.ask(replace(turn, keep_ratio=ratio))
                if ratio == 1:
                    assert told.text == engine.generate(at_once(turns, said)).text
                said.append(told.text)
                assert 0 <= told.usage.cached_tokens < told.usage.prompt_tokens


def test_other_requests_in_between_change_nothing(engine: Engine, turns: list[Request]) -> None:
    alone = engine.converse()
    wanted = [alone.ask(turn).text for turn in turns[:3]]
    one, other = engine.converse(), engine.converse()
    mixed = []
    for turn in turns[:3]:
        mixed.append(one.ask(turn).text)
        other.ask(replace(turns[2], max_new_tokens=2))
    assert mixed == wanted


def test_a_closed_conversation_computes_itself_anew(engine: Engine, turns: list[Request]) -> None:
    kept, closed = engine.converse(), engine.converse()
    for turn in turns:
        closed.close()
        assert closed.ask(turn).text == kept.ask(turn).text
    assert closed.ask(turns[1]).usage.cached_tokens > 0


def test_after_a_failed_turn_the_conversation_goes_on(
    tiny_checkpoint: Path, turns: list[Request], force_plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_plan(slabs=TOP_K, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), compute_dtype="float32")) as engine:
        talk = engine.converse()
        wanted = [talk.ask(turn).text for turn in turns[:2]]
        other = engine.converse()
        assert other.ask(turns[0]).text == wanted[0]

        def failing(*args: Any) -> None:
            raise OSError("no such luck")

        with monkeypatch.context() as patch:
            patch.setattr(ExpertStore, "read_batch", failing)
            with pytest.raises(CheckpointError, match="no such luck"):
                other.ask(turns[1])
        with pytest.raises(UsageError):
            other.ask(Request((), " "))
        assert other.ask(turns[1]).text == wanted[1]


def test_a_conversation_that_outgrows_the_budget_is_refused_and_can_be_closed(
    tiny_checkpoint: Path, picture: Image.Image
) -> None:
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint), image_size=(64, 48), context=100))
    config = EngineConfig(model=str(tiny_checkpoint), device_memory=plan.minimum_bytes)
    with Engine.load(config, image_size=(64, 48), context_tokens=100) as engine:
        talk = engine.converse()
        talk.ask(Request((picture,), "What is this?", 4))
        engine.generate(Request((), "x", 4))
        talk.ask(Request((), "What else?", 4))
        with pytest.raises(BudgetError, match="tokens in all"):
            talk.ask(Request((), "What else is there to be seen in it? " * 9, 4))
        turns = len(talk.messages)
        with pytest.raises(BudgetError):
            engine.generate(Request((picture,), "Hm? " * 8, 4))
        talk.close()
        assert engine.generate(Request((picture,), "Hm? " * 8, 4)).text
        assert len(talk.messages) == turns


def test_messages_may_hold_their_pictures_in_any_place(engine: Engine, make_picture: Any) -> None:
    one, two = make_picture(64, 48), make_picture(48, 48, 1)
    first = Message("user", ("Here ", Picture(one), " and there ", Picture(two), ": which?"))
    told = engine.generate(Request((), "", 4, history=(Message("system", ("Be brief.",)), first)))
    assert told.usage.visual_tokens > 12
    swapped = Message("user", ("Here ", Picture(two), " and there ", Picture(one), ": which?"))
    other = engine.generate(Request((), "", 4, history=(Message("system", ("Be brief.",)), swapped)))
    assert told.usage == other.usage


@pytest.mark.parametrize(
    ("history", "said"),
    [
        ((Message("user", ("x",)), Message("assistant", ("y",))), "must end with the user"),
        ((Message("user", (" ",)),), "empty"),
        ((Message("assistant", ("<|image_pad|>",)), Message("user", ("x",))), "assistant's message"),
    ],
)
def test_what_cannot_be_answered_is_refused(engine: Engine, history: tuple[Message, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        engine.generate(Request((), "", 4, history=history))
