"""The recipe of the reference model, end to end on a tiny shape: it ends, resumes exactly, and its files load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLMoeForConditionalGeneration

from vismmoe_training.reference.recipe import Recipe, RecipeConfig
from vismmoe_training.reference.shape import ReferenceShape

TINY = ReferenceShape(layers=2, hidden_size=32, heads=2, kv_heads=1, head_dim=32, experts=8, top_k=2, expert_width=8)
SHORT = RecipeConfig(
    vision_scenes=24,
    vision_steps=4,
    vision_batch=4,
    whole_scenes=24,
    whole_steps=4,
    whole_batch=4,
    easy_steps=2,
    epoch_steps=2,
    threads=1,
    watch_scenes=0,
)
STAGES = ("vision", "whole")


def _run(config: RecipeConfig) -> Recipe:
    recipe = Recipe(config, replace(TINY, vision_layers=2, deepstack_layers=(0,), vision_hidden=32, vision_width=32))
    recipe.train_vision()
    recipe.train_whole()
    return recipe


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_that_was_killed_ends_with_the_weights_of_an_unbroken_one(stage: str, tmp_path: Path) -> None:
    unbroken = _run(replace(SHORT, work=tmp_path / "unbroken"))
    config = replace(SHORT, work=tmp_path / "broken")
    killed = Recipe(replace(config, stop_after_epochs=1 if stage == "vision" else None), unbroken.shape)
    killed.train_vision()
    if stage == "whole":
        killed.config = replace(config, stop_after_epochs=1)
        killed.train_whole()
    resumed = _run(config)
    for name, value in unbroken.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_the_exported_folder_loads_and_its_card_tells_what_was_measured(tmp_path: Path) -> None:
    recipe = _run(replace(SHORT, work=tmp_path / "work"))
    measured = recipe.export(tmp_path / "model", scenes=8)
    assert Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "model") is not None
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"**{measured.overall:.3f}**" in card
    assert "Outside the bands" in card  # so small a model cannot route like a real one, and the card says so
    assert json.loads((tmp_path / "model" / "measured.json").read_text())["overall"] == measured.overall


def test_the_decoder_of_a_finished_model_trains_on_and_is_watched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _run(replace(SHORT, work=tmp_path / "first"))
    first.export(tmp_path / "model", scenes=4)
    config = replace(SHORT, work=tmp_path / "second", start_from=tmp_path / "model", watch_scenes=4)
    second = _run(config)
    saved = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32).state_dict()
    changed = {name for name, value in second.model.state_dict().items() if not torch.equal(value, saved[name])}
    assert not [name for name in changed if ".visual." in name]
    assert "model.language_model.layers.0.mlp.gate.weight" in changed
    told = capsys.readouterr().err
    assert "step 2: exact match 0." in told
    assert "next_gate 0." in told
