"""Pictures as people have them, through a whole request."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request, plan_for
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


@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Glm4vImageProcessor"])
def test_pixel_limits_are_those_of_the_checkpoint_s_own_processor(
    kind: str, make_picture: Any, checkpoint_copy: Path
) -> None:
    import transformers

    from vismmoe.models.catalogue import FAMILIES
    from vismmoe.models.checkpoint import open_checkpoint
    from vismmoe.models.footprint import image_limits, visual_tokens
    from vismmoe.models.load import limit_pixels

    own = getattr(transformers, kind)
    frames = 2 if kind.startswith("Glm4v") else 1  # GLM counts each pixel twice
    low, high = 32 * 32, 256 * 256
    pictures = [make_picture(400, 320), make_picture(40, 300, 1), make_picture(20, 20, 2)]
    shape = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    for least, most in ((None, 4096), (16384, None), (None, None), (4096, 9000)):
        ours = SimpleNamespace(image_processor=own(size={"shortest_edge": low, "longest_edge": high}, **shape))
        limit_pixels(ours, FAMILIES["qwen3_vl_moe"], least, most)
        size = {
            "shortest_edge": low if least is None else least * frames,
            "longest_edge": high if most is None else most * frames,
        }
        told = ours.image_processor(images=pictures, return_tensors="pt")
        wanted = own(**shape)(images=pictures, size=size, return_tensors="pt")
        assert torch.equal(told["image_grid_thw"], wanted["image_grid_thw"])
        assert torch.equal(told["pixel_values"], wanted["pixel_values"])
        areas = [rows * columns * 64 for _, rows, columns in told["image_grid_thw"].tolist()]
        assert max(areas) <= (most or high // frames)
        assert min(areas) >= (least or low // frames)
        if (least, most) == (None, None):  # the plan reckons without loading the processor
            ours.image_processor.save_pretrained(checkpoint_copy)
            (checkpoint_copy / "processor_config.json").unlink()
            limits = image_limits(open_checkpoint(checkpoint_copy))
            assert [visual_tokens(limits, one.size) * 4 * 64 for one in pictures[:2]] == areas[:2]


def test_a_pixel_limit_is_planned_with_and_reaches_the_model(tiny_checkpoint: Path, make_picture: Any) -> None:
    picture, question = make_picture(256, 256), "What is this?"
    wide = PlanConfig(model=str(tiny_checkpoint), image_size=(256, 256))
    narrow = PlanConfig(model=str(tiny_checkpoint), image_size=(256, 256), max_pixels=64 * 64)
    assert plan_for(narrow).minimum_bytes < plan_for(wide).minimum_bytes
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), max_pixels=64 * 64)) as engine:
        assert engine.generate(Request((picture,), question, 1)).usage.visual_tokens == 16
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), min_pixels=96 * 96)) as engine:
        assert engine.generate(Request((make_picture(20, 20),), question, 1)).usage.visual_tokens == 36


def test_a_pixel_limit_that_would_change_nothing_or_cannot_be_is_refused(make_family: Any, tmp_path: Path) -> None:
    folder = make_family("deepseek_vl_v2", tmp_path)
    with pytest.raises(UsageError, match="change nothing for deepseek_vl_v2"):
        Engine.load(EngineConfig(model=str(folder), max_pixels=100_000))
    with pytest.raises(UsageError, match="no picture has so many and so few"):
        EngineConfig(max_pixels=10, min_pixels=11)
