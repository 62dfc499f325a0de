"""Pictures as people have them, through a whole request."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vismmoe.config import EngineConfig
from vismmoe.engine import Engine, Request
from vismmoe.errors import ImageError, UsageError


@pytest.fixture(scope="module")
def engine(tiny_checkpoint: Path) -> Iterator[Engine]:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as held:
        yield held


@pytest.mark.parametrize("size", [(1, 1), (30, 305), (23, 237), (10, 1990), (1990, 10)])
def test_small_and_narrow_pictures_are_answered(engine: Engine, make_picture: Any, size: tuple[int, int]) -> None:
    told = engine.generate(Request((make_picture(*size),), "What is this?", 1))
    assert told.usage.visual_tokens > 0


def test_a_strip_that_the_processor_refuses_is_told_with_its_size(engine: Engine, make_picture: Any) -> None:
    with pytest.raises(ImageError, match=r"10 x 2010: .*200"):
        engine.generate(Request((make_picture(10, 2010),), "What is this?", 1))


def test_an_animation_is_told_of_once(engine: Engine, make_picture: Any) -> None:
    frames = [make_picture(40, 40, seed) for seed in (1, 2)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    animated = engine.generate(Request((out.getvalue(), out.getvalue()), "What is this?", 1))
    assert sum("only the first is looked at" in note for note in animated.fallbacks) == 1
    assert engine.generate(Request((frames[0],), "What is this?", 1)).fallbacks == ()


def test_the_order_of_pictures_reaches_the_model(engine: Engine, make_picture: Any) -> None:
    wide, tall = make_picture(160, 48), make_picture(48, 160)
    seen: list[Any] = []
    tower: Any = engine._model.get_submodule("model.visual")
    handle = tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["grid_thw"].tolist()), with_kwargs=True
    )
    for pictures in ((wide, tall), (tall, wide)):
        engine.generate(Request(pictures, "What is this?", 1))
    handle.remove()
    assert seen[0] == seen[1][::-1]
    assert seen[0][0] != seen[0][1]


def test_a_question_in_another_encoding_is_told(engine: Engine) -> None:
    with pytest.raises(UsageError, match="not UTF-8 text"):
        engine.generate(Request((), b"caf\xe9?".decode("utf-8", "surrogateescape"), 1))


@pytest.mark.parametrize("mark", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>"])
def test_a_mark_in_the_question_is_refused_by_name(engine: Engine, picture: Image.Image, mark: str) -> None:
    with pytest.raises(UsageError) as raised:
        engine.generate(Request((picture,), f"What is {mark} here?", 1))
    assert repr(mark) in str(raised.value)
