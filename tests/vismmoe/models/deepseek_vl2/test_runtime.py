"""DeepSeek-VL2 through the engine: streamed, prefetched and compressed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vismmoe.models.deepseek_vl2.saliency as saliency
from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request, plan_for
from vismmoe.errors import UsageError
from vismmoe.models.cache_bytes import cache_bytes
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.models.deepseek_vl2.sequence import merge_patches
from vismmoe.models.footprint import image_tokens
from vismmoe.models.hooks import submodule
from vismmoe.models.load import load_model
from vismmoe.predictors.next_gate import NextGate

from .conftest import PART, Case, model_of, processor_of

FOLDER = PART / "base"
CASE = Case(PART, "base", "b_single_tile")
QUESTION = "What is in this image?"


def engine(predictor: Any = None, **changes: Any) -> Engine:
    return Engine.load(EngineConfig(model=str(FOLDER), compute_dtype="float32", **changes), predictor)


def guided(**changes: Any) -> Engine:
    with engine() as plain:
        gate = NextGate(plain.spec, plain.routers, plain.router_norms, 2)
    return engine(gate, **changes)


def requests() -> dict[str, Request]:
    (one,) = CASE.pictures
    wide, tall = one.resize((150, 70)), one.resize((70, 150))
    return {
        "one": Request((one,), QUESTION, 6),
        "two": Request((wide, tall), QUESTION, 6),
        "three": Request((wide, one, tall), QUESTION, 6),
        "text": Request((), "Describe the tiny world of cats and dogs.", 6),
        "half": Request((wide, tall), QUESTION, 6, keep_ratio=0.5),
        "random half": Request((wide,), QUESTION, 6, keep_ratio=0.5, compressor="random"),
    }


@pytest.fixture(scope="module")
def resident(answer: Callable[..., Any]) -> dict[str, Any]:
    with engine() as held:
        return {name: answer(held, request) for name, request in requests().items()}


def test_the_engine_answers_as_the_official_implementation(resident: dict[str, Any]) -> None:
    wanted = CASE.expected["greedy_tokens"][0, :6].tolist()
    assert resident["one"].result.text == processor_of(FOLDER).tokenizer.decode(wanted, skip_special_tokens=True)
    torch.testing.assert_close(resident["one"].logits[0][0], CASE.expected["logits"][0, -1], rtol=0, atol=2e-4)


def test_streaming_and_prefetching_change_no_bit(resident: dict[str, Any], answer: Any, force_plan: Any) -> None:
    force_plan(slabs=5, pinned_layers=1)
    with engine() as plain, guided() as ahead:
        for name, request in requests().items():
            told = answer(plain, request)
            assert told.same_bits(resident[name]), name
            assert answer(ahead, request).same_bits(resident[name]), name
            assert told.result.experts.decode.demand_loads > 0


def test_usage_counts_every_row_of_an_image(resident: dict[str, Any]) -> None:
    usage = {name: held.result.usage for name, held in resident.items()}
    assert (usage["one"].prompt_tokens, usage["one"].visual_tokens) == (43, 25)
    assert usage["half"].kept_visual_tokens == usage["half"].visual_tokens // 2 < usage["two"].kept_visual_tokens
    assert usage["text"].visual_tokens == 0


@pytest.mark.parametrize("name", ["half", "random half"])
def test_dropping_tokens_equals_hiding_them_from_the_deeper_layers(
    resident: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kept: list[Tensor] = []
    seen = Engine._report

    def spy(self: Engine, asked: Any, *rest: Any) -> Any:
        kept.append(asked.session.kept())
        return seen(self, asked, *rest)

    monkeypatch.setattr(Engine, "_report", spy)
    with engine() as held:
        held.generate(requests()[name])
        last_prefix_layer = held.spec.moe_layers[held.prefix_layers - 1]
    model, request = model_of(FOLDER), requests()[name]
    inputs = processor_of(FOLDER)(
        images=list(request.images),
        text="<|User|>: " + "<image>\n" * len(request.images) + QUESTION + "\n\n<|Assistant|>:",
    )
    hidden = torch.ones(inputs["input_ids"].shape[1], dtype=torch.bool)
    hidden[kept[0]] = False
    causal = torch.full((len(hidden), len(hidden)), float("-inf")).triu(1)
    causal = causal.masked_fill(hidden & ~torch.eye(len(hidden), dtype=torch.bool), float("-inf"))
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, "attention_mask": causal[None, None]}), with_kwargs=True
        )
        for layer in model.language.model.layers[last_prefix_layer + 1 :]
    ]
    with torch.no_grad():
        wanted = model(**inputs, use_cache=False).logits[:, -1]
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(resident[name].logits[0], wanted, rtol=0, atol=2e-4)


def test_saliency_is_the_attention_of_the_towers_last_block() -> None:
    model, inputs = model_of(FOLDER), CASE.inputs
    found: list[Tensor] = []
    block: Any = submodule(model, "vision.encoder.layers.-1.self_attn")

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        found.append(saliency.view_saliency(module, args[0] if args else kwargs["hidden_states"], kwargs, 2, inputs))

    handle = block.register_forward_pre_hook(watch, with_kwargs=True)
    model.vision.set_attn_implementation("eager")
    with torch.no_grad():
        model(**inputs)
        weights = model.vision(inputs["images"][0], output_attentions=True).attentions[-1]
    model.vision.set_attn_implementation("sdpa")
    handle.remove()
    shares = (weights.mean((1, 2)) * 25).view(2, 5, 5)  # of each view's 5 x 5 patches, relative to the uniform share
    rows = found[0]
    assert rows.shape == (25,)
    assert rows[0] == pytest.approx(float(shares[0, :2, :2].mean()), abs=1e-5)
    assert rows[2] == pytest.approx(float(shares[0, :2, 4:].mean()), abs=1e-5), "padding is no patch"
    assert rows[3] == pytest.approx(float(rows[:3].mean()), abs=1e-5), "a newline counts as its row's mean"
    assert rows[13] == pytest.approx(float(shares[1, :2, :2].mean()), abs=1e-5), "the tile after the separator"
    assert not rows.isnan().any()


def test_the_plan_counts_views_and_the_latent_cache() -> None:
    checkpoint = open_checkpoint(FOLDER)
    for size, tokens in (((60, 58), 25), ((150, 70), 34)):
        assert image_tokens(checkpoint, size) == tokens
    assert cache_bytes(checkpoint.config, 1).per_token == 4 * (20 + 8)
    assert checkpoint.spec.moe_layers == (1, 2, 3)
    plan = plan_for(PlanConfig(model=str(FOLDER)))
    assert plan.planned["shared_experts"] > 0, "shared experts are always resident"


def test_a_mark_in_the_question_is_refused() -> None:
    with engine() as held, pytest.raises(UsageError, match="<image>"):
        held.generate(Request(tuple(CASE.pictures), "What is <image> here?", 2))


def test_a_releases_shards_are_read_without_running_code(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(FOLDER)
    assert {entry.origin.file.name for entry in checkpoint.backbone.values()} == {
        f"model-0000{number}-of-000003.safetensors" for number in (1, 2, 3)
    }
    assert not any("attn_pool" in name for name in checkpoint.backbone)


def test_query_key_and_value_that_are_published_as_one_are_kept_once() -> None:
    checkpoint = open_checkpoint(FOLDER)
    model = load_model(checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    held = [parameter for parameter in model.parameters() if not parameter.is_meta]
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in held)


def test_merged_patches_lie_in_order_so_that_tiles_share_one_weight() -> None:
    assert merge_patches(torch.randn(3, 25, 8), 2).is_contiguous()
