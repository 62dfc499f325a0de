"""A vision tower that is read block by block gives the bits of a resident one and takes less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request, plan_for
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.models.tower import streamed_names, tower_units


def test_a_streamed_tower_changes_no_bit_and_is_empty_again_afterwards(
    tiny_checkpoint: Path, picture: Image.Image, answer: Callable[[Engine, Request], Any]
) -> None:
    request = Request((picture,), "What is this?", 6)
    answers = []
    for vision in ("resident", "streamed"):
        config = EngineConfig(model=str(tiny_checkpoint), device="cpu", vision=vision)  # type: ignore[arg-type]
        with Engine.load(config) as engine:
            answers += [answer(engine, request), answer(engine, request)]
            on_meta = {name for name, held in engine.model.named_parameters() if held.is_meta and ".visual." in name}
            assert on_meta == (streamed_names(engine.checkpoint) if vision == "streamed" else set())
    assert all(each.same_bits(answers[0]) for each in answers)


def test_the_plan_counts_a_streamed_tower_by_the_blocks_that_are_there_together(tiny_checkpoint: Path) -> None:
    resident, streamed = (
        plan_for(PlanConfig(model=str(tiny_checkpoint), device="cpu", vision=vision)).planned["vision"]  # type: ignore[arg-type]
        for vision in ("resident", "streamed")
    )
    assert 0 < streamed <= resident
    assert tower_units(open_checkpoint(tiny_checkpoint))
