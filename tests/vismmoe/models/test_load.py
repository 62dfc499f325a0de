"""What is loaded equals what transformers loads; routed experts are never allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vismmoe.errors import CheckpointError
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.models.load import load_model, load_processor, moe_norm_weights, router_weights


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(open_checkpoint(folder), device=torch.device("cpu"), dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_and_buffers_are_those_of_transformers(tmp_path: Path, make_tiny: Any, tied: bool) -> None:
    from transformers import AutoModelForImageTextToText

    folder = make_tiny(tmp_path, tied=tied)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ours = load(folder)
    wanted = dict(theirs.named_parameters(remove_duplicate=False)) | dict(theirs.named_buffers())
    found = dict(ours.named_parameters(remove_duplicate=False)) | dict(ours.named_buffers())
    assert set(found) == set(wanted)
    for name, value in found.items():
        if ".experts." in name:
            assert value.is_meta
        else:
            assert torch.equal(value, wanted[name]), name
    shared = ours.lm_head.weight is ours.model.language_model.embed_tokens.weight
    assert shared == tied


def test_nothing_but_experts_stays_without_memory(tiny_checkpoint: Path) -> None:
    model = load(tiny_checkpoint)
    meta = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    assert len(meta) == 12
    assert all(".mlp.experts." in name for name in meta)
    assert not any(value.requires_grad for value in model.parameters() if not value.is_meta)
    assert not model.training


def test_parameters_come_in_the_asked_number_format_and_buffers_stay_exact(tiny_checkpoint: Path) -> None:
    model = load(tiny_checkpoint, torch.bfloat16)
    assert model.lm_head.weight.dtype is torch.bfloat16
    assert model.model.language_model.rotary_emb.inv_freq.dtype is torch.float32


def test_routers_and_norms_are_told_per_layer(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    model = load(tiny_checkpoint)
    routers, norms = router_weights(model, checkpoint), moe_norm_weights(model, checkpoint)
    assert list(routers) == list(norms) == list(range(6))
    assert routers[4].shape == (16, 32)
    layer: Any = model.model.language_model.layers[4]
    assert torch.equal(norms[4], layer.post_attention_layernorm.weight)


def test_a_folder_without_a_processor_is_refused(checkpoint_copy: Path) -> None:
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (checkpoint_copy / name).unlink()
    with pytest.raises(CheckpointError, match="processor"):
        load_processor(checkpoint_copy, open_checkpoint(checkpoint_copy).family)
