"""The transformers model of a checkpoint without any weights, and the names of its parts."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vismmoe.errors import CheckpointError
from vismmoe.models.catalogue import Family, family_of
from vismmoe.untrusted import read_json

DEPTH_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "depth", "layers")
MAX_DEPTH = 4096
UNSET = -7  # in integer buffers until they are computed


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
        raw = read_json(file, infinite=True)
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    family = family_of(raw.get("model_type"))
    _check_depth(raw, file)
    text = raw.get("text_config")
    quantised = raw.get("quantization_config") or (text if isinstance(text, dict) else {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise CheckpointError(f"{folder} is quantised ({method}), which is not run; use the unquantised checkpoint")
    return _parse(family, raw, file), family, raw


def build_skeleton(config: Any, family: Family) -> nn.Module:
    """The model with every parameter on the meta device and every non-persistent buffer real (float32, CPU)."""
    kind = named_class(family.model_class)
    try:
        with torch.device("meta"):
            model: nn.Module = kind._from_config(config)
    except Exception as error:  # sizes that contradict each other end in whatever the model's code stumbles over
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"no {family.model_type} can be built from this config.json ({told})") from None
    rebuild_buffers(model)
    return model.eval()


def _check_depth(raw: dict[str, Any], file: Path) -> None:
    """Layers are built one by one, even without weights: a number that no model has would take for ever."""
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key in DEPTH_KEYS:
            depth = part.get(key)
            if depth is not None and (type(depth) is not int or not 0 <= depth <= MAX_DEPTH):
                raise CheckpointError(f"{file} says {key}: {depth!r:.40}, which no model has")


def named_class(name: str) -> Any:
    """A class by "module:attribute", or by its name in transformers."""
    module, _, attribute = name.rpartition(":")
    try:
        return getattr(import_module(module or "transformers"), attribute)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"the installed transformers cannot run this model: it has no {name} ({error})") from None


def rebuild_buffers(model: nn.Module) -> None:
    """Give modules with computed buffers (rotary frequencies) real ones: no checkpoint holds them.

    transformers computes them again where its own loading does, in the model's _init_weights; a module that it passes
    over is built once more by its constructor.
    """
    owners: list[tuple[str, Any]] = [(n, m) for n, m in model.named_modules() if hasattr(m, "_init_weights")]
    for name, module in list(model.named_modules()):
        lost = [key for key in module._non_persistent_buffers_set if _on_meta(module, key)]
        if not lost:
            continue
        owner = max((n for n in owners if n[0] == "" or f"{name}.".startswith(f"{n[0]}.")), key=lambda n: len(n[0]))[1]
        if not (_initialised(owner, module, lost) or _constructed(module, lost)):
            raise CheckpointError(f"the buffers {', '.join(lost)} of {name} cannot be rebuilt with this transformers")


def _initialised(owner: Any, module: nn.Module, lost: list[str]) -> bool:
    """Whether transformers' own initialisation fills the buffers."""
    for key in lost:
        meta = module._buffers[key]
        assert meta is not None
        fill = torch.nan if meta.is_floating_point() or meta.is_complex() else UNSET
        kind = torch.bool if meta.dtype is torch.bool else meta.dtype
        module._buffers[key] = torch.full(meta.shape, True if kind is torch.bool else fill, dtype=kind)
    before = {key: _held(module, key).clone() for key in lost}
    parameters = dict(module._parameters)
    try:
        with torch.no_grad():
            owner._init_weights(module)
    except Exception:  # whatever the model's code raises: the constructor is asked next
        return False
    finally:
        module._parameters.update(parameters)
    now = {key: _held(module, key) for key in lost}
    return all(not torch.equal(before[key], held) and not held.isnan().any() for key, held in now.items())


def _constructed(module: nn.Module, lost: list[str]) -> bool:
    try:
        fresh = type(module)(module.config)
    except Exception:
        return False
    for key in lost:
        module.register_buffer(key, fresh.get_buffer(key), persistent=False)
    return True


def _held(module: nn.Module, key: str) -> torch.Tensor:
    held = module._buffers[key]
    assert held is not None
    return held


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

    kind = named_class(family.model_class).config_class or CONFIG_MAPPING[family.model_type]
    try:
        return kind.from_dict(kind._decode_special_floats(raw))  # infinity is no JSON
    except Exception as error:  # transformers checks configs with errors of its own
        raise CheckpointError(f"{file} is not a valid {family.model_type} config ({error})") from None
