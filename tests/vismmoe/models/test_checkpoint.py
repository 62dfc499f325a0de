"""A checkpoint is told whole or refused by name; the layout's ranges hold the experts' very bytes."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vismmoe.errors import CheckpointError
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.store import ExpertStore
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.models.generation import stop_tokens
from vismmoe.types import ExpertId

LAYER = "model.language_model.layers.3.mlp.experts"


def edit_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *parents, key = path.split("__")
        target = config
        for parent in parents:
            target = target[parent]
        target[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_spec_is_what_the_config_says(tiny_checkpoint: Path) -> None:
    spec = open_checkpoint(tiny_checkpoint).spec
    assert (spec.family, spec.num_layers, spec.num_experts, spec.top_k) == ("qwen3_vl_moe", 6, 16, 4)
    assert (spec.hidden_size, spec.expert_width, spec.moe_layers) == (32, 24, tuple(range(6)))


def test_dense_layers_among_the_decoder_layers_are_not_moe_layers(checkpoint_copy: Path) -> None:
    def dense(tensors: dict[str, torch.Tensor]) -> None:
        prefix = "model.language_model.layers.0.mlp."
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        tensors |= {f"{prefix}{kind}_proj.weight": torch.zeros(48, 32) for kind in ("gate", "up")}
        tensors[f"{prefix}down_proj.weight"] = torch.zeros(32, 48)

    folder = edit_tensors(edit_config(checkpoint_copy, text_config__mlp_only_layers=[0]), dense)
    assert open_checkpoint(folder).spec.moe_layers == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_slab_holds_the_weights_that_transformers_would_load(
    tmp_path: Path, make_tiny: Any, spread_over_files: Any, transposed: bool, spread: bool
) -> None:
    def straight(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: v.transpose(1, 2).contiguous() if ".experts." in k else v for k, v in tensors.items()}

    folder = make_tiny(tmp_path, change=None if transposed else straight)
    published = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(spread_over_files(folder) if spread else folder)
    assert all(part.transposed == transposed for part in checkpoint.layout.parts)
    pool = SlabPool(1, checkpoint.layout)
    with ExpertStore.open(checkpoint.layout) as store:
        store.read_into(ExpertId(3, 7), pool.bytes(0))
    weights = pool.weights(0)
    assert weights["gate_up_proj"].shape == (48, 32)
    assert weights["down_proj"].shape == (32, 24)
    for part in ("gate_up_proj", "down_proj"):
        wanted = published[f"{LAYER}.{part}"][7]
        assert torch.equal(weights[part], wanted.T if transposed else wanted)


def test_the_fingerprint_ignores_files_and_versions_but_not_routers_or_shapes(
    tiny_checkpoint: Path, checkpoint_copy: Path, tmp_path: Path, spread_over_files: Any
) -> None:
    wanted = open_checkpoint(tiny_checkpoint).spec.fingerprint
    spread = spread_over_files(Path(shutil.copytree(tiny_checkpoint, tmp_path / "spread")))
    assert open_checkpoint(edit_config(spread, transformers_version="9.9")).spec.fingerprint == wanted
    name = "model.language_model.layers.2.mlp.gate.weight"
    edit_tensors(checkpoint_copy, lambda tensors: tensors[name][0].add_(1))
    assert open_checkpoint(checkpoint_copy).spec.fingerprint != wanted


def test_tied_embeddings_may_be_written_once_or_twice(tmp_path: Path, make_tiny: Any) -> None:
    folder = make_tiny(tmp_path, tied=True)
    assert set(open_checkpoint(folder).tied) == {"lm_head.weight"}
    embedding = "model.language_model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    assert "lm_head.weight" not in open_checkpoint(folder).backbone


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("model.language_model.norm.weight"), "lacks model.language_model.norm.weight"),
        (lambda t: t.pop(f"{LAYER}.down_proj"), "lacks .*layers.3.mlp.experts.down_proj"),
        (lambda t: t.update({"model.extra": torch.zeros(1)}), "model.extra"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(3, 32)}), r"lm_head.weight has shape \[3, 32\]"),
        (lambda t: t.update({f"{LAYER}.down_proj": torch.zeros(16, 24, 31).bfloat16()}), r"layers.3.*\[16, 24, 31\]"),
        (lambda t: t.update({f"{LAYER}.down_proj": torch.zeros(16, 24, 32)}), "experts are of type"),
        (lambda t: t.update({k: v.to(torch.float8_e4m3fn) for k, v in t.items() if "experts" in k}), "float8"),
    ],
)  # fmt: skip
def test_wrong_tensors_are_refused_by_name(checkpoint_copy: Path, change: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(edit_tensors(checkpoint_copy, change))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "llava"}, "'llava' is not built yet"),
        ({"model_type": None}, "not built yet"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, r"quantised \(awq\)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "desc_act": False}}, r"quantised \(gptq\)"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, r"quantised \(fp8\)"),
        ({"text_config__quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config__mlp_only_layers": list(range(6))}, "no decoder layer"),
        ({"text_config__hidden_size": "wide"}, "not a valid"),
    ],
)
def test_a_config_that_is_not_run_is_refused_by_name(checkpoint_copy: Path, changes: Any, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(edit_config(checkpoint_copy, **changes))


def in_blocks(tensors: dict[str, torch.Tensor]) -> None:
    """The layout of the official FP8 releases: each packed weight in FP8, with one scale for each block beside it."""
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(16, 1, 1)


def in_groups(tensors: dict[str, torch.Tensor]) -> None:
    """GPTQ and AWQ: eight weights of 4 bits in an int32, zero points and scales of each group beside them."""
    for name in [name for name in tensors if name.endswith(".o_proj.weight")]:
        rows, columns = tensors.pop(name).shape
        base = name.removesuffix(".weight")
        tensors[f"{base}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
        tensors[f"{base}.qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
        tensors[f"{base}.scales"] = torch.ones(1, rows, dtype=torch.float16)


@pytest.mark.parametrize(("quantise", "told"), [(in_blocks, "FP8 in blocks"), (in_groups, "GPTQ or AWQ")])
def test_a_quantised_layout_is_refused_by_name_where_the_config_does_not_say_it(
    checkpoint_copy: Path, quantise: Callable[[dict[str, torch.Tensor]], None], told: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"is quantised \({told}: it holds .*use the unquantised"):
        open_checkpoint(edit_tensors(checkpoint_copy, quantise))


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_a_damaged_config_is_refused(checkpoint_copy: Path, content: str) -> None:
    (checkpoint_copy / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(checkpoint_copy)


def test_folders_that_are_none_are_refused(tmp_path: Path, checkpoint_copy: Path) -> None:
    with pytest.raises(CheckpointError, match="no model folder at"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (checkpoint_copy / "model.safetensors").rename(checkpoint_copy / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only safetensors"):
        open_checkpoint(checkpoint_copy)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config__num_hidden_layers", 10**9),
        ("text_config__num_hidden_layers", "6"),
        ("text_config__num_attention_heads", 0),
        ("text_config__num_experts_per_tok", 10**6),
        ("text_config__vocab_size", -5),
        ("text_config__hidden_act", "__import__('os')"),
        ("text_config__rope_parameters", {"rope_type": "evil"}),
        ("text_config", [1]),
        ("vision_config", [1]),
        ("vision_config__depth", 10**7),
        ("model_type", {"a": 1}),
    ],
    ids=str,
)
def test_a_config_of_values_that_cannot_be_is_refused_in_a_sentence(
    checkpoint_copy: Path, path: str, value: object
) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(edit_config(checkpoint_copy, **{path: value}))


@pytest.mark.parametrize("content", [b"\x80\x02}", b"[]", b"[" * 200_000, b"\xff\xfe{}"])
def test_a_config_that_is_none_is_refused(checkpoint_copy: Path, content: bytes) -> None:
    (checkpoint_copy / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(checkpoint_copy)


def test_a_pickle_under_the_name_of_safetensors_is_not_opened(checkpoint_copy: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
            return Path.touch, (checkpoint_copy / "sprung",)

    (checkpoint_copy / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match="no whole safetensors"):
        open_checkpoint(checkpoint_copy)
    assert not (checkpoint_copy / "sprung").exists()


@pytest.mark.parametrize("told", ["{", "[1]", '{"eos_token_id": "x"}', '{"eos_token_id": [1e30]}', "[" * 200_000])
def test_ends_of_answers_that_are_no_tokens_are_refused(checkpoint_copy: Path, told: str) -> None:
    checkpoint = open_checkpoint(checkpoint_copy)
    (checkpoint_copy / "generation_config.json").write_text(told)
    if told == "[1]":  # says nothing of ends: the config does
        assert stop_tokens(checkpoint, None) == [258]
        return
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be used|no ids of tokens"):
        stop_tokens(checkpoint, None)
