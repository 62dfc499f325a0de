"""The transformers model of a checkpoint without any weights, and the names of its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vismmoe.errors import CheckpointError
from vismmoe.models.catalogue import Family, family_of


def read_config(folder: Path) -> tuple[Any, Family, dict[str, Any]]:
    """The transformers config of `folder`, its family, and config.json as it stands.

    Raises CheckpointError for a missing folder, a damaged config, another family, or quantised weights.
    """
    file = folder / "config.json"
    if not folder.is_dir():
        raise CheckpointError(f"there is no model folder at {folder}")
    if not file.is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no config.json")
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error})") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    family = family_of(raw.get("model_type"))
    quantised = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"{folder} is quantised ({method}), which is not run; use the unquantised checkpoint")
    return _parse(family, raw, file), family, raw


def build_skeleton(config: Any, family: Family) -> nn.Module:
    """The model with every parameter on the meta device and every non-persistent buffer real (float32, CPU)."""
    import transformers

    with torch.device("meta"):
        model: nn.Module = getattr(transformers, family.model_class)._from_config(config)
    rebuild_buffers(model)
    return model.eval()


def rebuild_buffers(model: nn.Module) -> None:
    """Give modules with computed buffers (rotary frequencies) real ones: no checkpoint holds them."""
    for name, module in list(model.named_modules()):
        lost = [key for key in module._non_persistent_buffers_set if _on_meta(module, key)]
        if not lost:
            continue
        try:
            fresh = type(module)(module.config)
        except Exception as error:
            raise CheckpointError(f"the buffers of {name} cannot be rebuilt with this transformers ({error})") from None
        for key in lost:
            module.register_buffer(key, fresh.get_buffer(key), persistent=False)


def experts_modules(model: nn.Module, family: Family) -> dict[int, nn.Module]:
    """Decoder layer index -> module that holds the routed experts, ascending."""
    found: dict[int, nn.Module] = {}
    layers: Any = model.get_submodule(family.layers)
    for index, layer in enumerate(layers):
        parts = dict(layer.named_modules())
        if family.experts in parts:
            found[index] = parts[family.experts]
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameter -> the parameter whose tensor it shares, when the config ties them."""
    keys: dict[str, str] = model.get_expanded_tied_weights_keys(all_submodels=False)  # type: ignore[operator]
    return dict(keys)


def _on_meta(module: nn.Module, key: str) -> bool:
    buffer = module._buffers.get(key)
    return buffer is not None and buffer.is_meta


def _parse(family: Family, raw: dict[str, Any], file: Path) -> Any:
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[family.model_type].from_dict(raw)
    except Exception as error:  # transformers checks configs with errors of its own
        raise CheckpointError(f"{file} is not a valid {family.model_type} config ({error})") from None
