"""The port gives what the official implementation gives, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vismmoe.models.deepseek_vl2 import DeepseekVL2ForConditionalGeneration

from .conftest import PART, Case, model_of, processed

LOGITS, SCORES = 2e-4, 2e-5  # absolute, as the vectors' makers suggest for float32


def run(case: Case) -> dict[str, Tensor]:
    """One forward without a cache; keys as in expected.safetensors."""
    model = model_of(case.folder)
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, output)

    text = model.language.model
    watched = {"vision": model.vision, "projector.out": model.projector, "final_norm.out": text.norm}
    for number, layer in enumerate(text.layers):
        watched[f"layers.{number}.out"] = layer
        watched[f"layers.{number}.attn_out"] = layer.self_attn
        watched[f"layers.{number}.mlp_out"] = layer.mlp
        if hasattr(layer.mlp, "gate"):
            watched[f"layers.{number}.moe"] = layer.mlp.gate
    handles = [module.register_forward_hook(keep(name)) for name, module in watched.items()]
    try:
        with torch.no_grad():
            seen["logits"] = model(**case.inputs, use_cache=False).logits
            inputs = case.inputs
            seen["inputs_embeds"] = model.prompt_embeddings(
                *(inputs[name] for name in ("input_ids", "images", "images_seq_mask", "images_spatial_crop"))
            )
            rows = model.image_rows(inputs["images"], inputs["images_spatial_crop"])
    finally:
        for handle in handles:
            handle.remove()
    return tidy(seen, rows, case.inputs["input_ids"].shape, model.config.text_config.scoring_func)


def tidy(seen: dict[str, Any], rows: list[Tensor], shape: torch.Size, scoring: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in seen.items():
        if name == "vision":
            found["vision.features"] = value.last_hidden_state
        elif name.endswith(".moe"):
            logits, weights, ids = value
            found[f"{name}.scores"] = (logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)).view(
                *shape, -1
            )
            order = ids.argsort(-1)
            found[f"{name}.topk_ids"] = ids.gather(-1, order).view(*shape, -1).int()
            found[f"{name}.topk_weights"] = weights.gather(-1, order).view(*shape, -1)
        else:
            found[name] = value[0] if isinstance(value, tuple) else value
    if rows:
        found["image_sequence"] = torch.cat(rows)
    return found


def tolerance(name: str) -> float:
    if "topk_ids" in name:
        return 0.0
    return LOGITS if name.startswith(("logits", "layers", "final_norm")) and ".moe." not in name else SCORES


def test_every_step_matches_the_official_one(case: Case) -> None:
    found, mask = run(case), case.inputs["attention_mask"]
    off: dict[str, float] = {}
    for name, wanted in case.expected.items():
        if name not in found:
            assert name.startswith(("greedy", "vision.patch_embed", "vision.blocks")), name
            continue
        ours = found[name]
        if ours.shape[:2] == mask.shape:
            ours, wanted = ours[mask], wanted[mask]
        assert ours.shape == wanted.shape, name
        off[name] = float((ours.double() - wanted.double()).abs().max())
    for kind in ("logits", "layers", "moe", "image", "vision", "projector"):
        print(f"{case} {kind}: {max((value for name, value in off.items() if kind in name), default=0):.1e}")
    assert "logits" in off
    assert {name: value for name, value in off.items() if value > tolerance(name)} == {}


def test_greedy_answers_through_the_cache_are_the_official_ones(case: Case) -> None:
    with torch.no_grad():
        ids = model_of(case.folder).generate(
            **case.inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=2
        )
    assert torch.equal(ids[:, -8:].int(), case.expected["greedy_tokens"])


def test_pictures_and_prompts_become_the_official_inputs(case: Case) -> None:
    stored = load_file(case.folder / "cases" / case.name / "inputs.safetensors")
    ours = processed(case)
    for name, value in stored.items():
        assert torch.equal(ours[name], value), name


def test_shards_in_the_official_layout_load_completely_and_save_back_as_they_were(tmp_path: Any) -> None:
    model, told = DeepseekVL2ForConditionalGeneration.from_pretrained(
        PART / "base", dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values()), told
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    wanted = {k: v for file in (PART / "base").glob("*.safetensors") for k, v in load_file(file).items()}
    wanted = {name: value.float() for name, value in wanted.items() if "attn_pool" not in name}
    assert sorted(saved) == sorted(wanted)
    for name, value in wanted.items():
        assert torch.equal(saved[name], value), name
    again = DeepseekVL2ForConditionalGeneration.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[0, 302, 28, 223, 57, 303]])
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model_of(PART / "base")(input_ids=ids).logits)


def test_marks_that_do_not_fit_the_images_are_refused() -> None:
    case = Case(PART, "base", "b_single_tile")
    inputs = case.inputs
    inputs["images_seq_mask"] = inputs["images_seq_mask"].clone()
    inputs["images_seq_mask"][0, -1] = True
    with pytest.raises(ValueError, match="marks 26 positions, the images have 25 rows"):
        model_of(case.folder)(**inputs)
