"""What a checkpoint holds and where, told from its headers alone.

Every tensor that the model needs must be there once, with the right shape, and nothing else may be: a wrong name is
refused here instead of leaving a part of the model at random values.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vismmoe.errors import CheckpointError
from vismmoe.models.catalogue import Family
from vismmoe.models.conversion import TensorSource, tensor_sources
from vismmoe.models.expert_ranges import expert_layout, parts_of
from vismmoe.models.headers import TensorEntry, read_headers
from vismmoe.models.skeleton import build_skeleton, experts_modules, read_config, tied_names
from vismmoe.types import ExpertLayout, ModelSpec

TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
QUANTISED: Mapping[str, str] = {  # how names of tensors end -> the layout that has such
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    "_scale_inv": "FP8 in blocks",
    ".weight_scale": "FP8 or compressed-tensors",
    ".weight_packed": "compressed-tensors",
    ".absmax": "bitsandbytes",
}
VOLATILE_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True)
class Checkpoint:
    """One opened checkpoint: nothing of it is loaded yet."""

    folder: Path
    family: Family
    config: Any  # transformers config
    spec: ModelSpec
    layout: ExpertLayout  # routed experts
    backbone: Mapping[str, TensorSource]  # parameter or buffer -> where it lies; all that is not a routed expert
    tied: Mapping[str, str]  # parameter -> the one it shares its tensor with


def open_checkpoint(folder: Path | str) -> Checkpoint:
    """Read config and headers of `folder`. CheckpointError names what is missing, surplus, mis-shaped or not run."""
    folder = Path(folder)
    config, family, raw = read_config(folder)
    model = build_skeleton(config, family)
    modules = {
        layer: (f"{family.layers}.{layer}.{family.experts}", module)
        for layer, module in experts_modules(model, family).items()
    }
    if not modules:
        raise CheckpointError(f"{folder}: no decoder layer of this config has routed experts")
    tensors = read_headers(folder)
    tied = tied_names(model)
    sources = _match(model, tensors, tied, folder)
    packed = {f"{path}.{part}" for path, module in modules.values() for part in parts_of(module)}
    layout = expert_layout(sources, modules, folder)
    backbone = {name: source for name, source in sources.items() if name not in packed}
    _check_shapes(model, backbone, folder)
    spec = _spec(config, family, modules, layout, _fingerprint(raw, tensors, model, backbone, family))
    return Checkpoint(folder, family, config, spec, layout, backbone, tied)


def _fingerprint(
    raw: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    model: nn.Module,
    backbone: Mapping[str, TensorSource],
    family: Family,
) -> str:
    """SHA-256 of config, tensor names with shapes and types, and the routers' weights.

    The routers are what a predictor learns, so two models of one shape differ; how the tensors are spread over files
    does not matter.
    """
    digest = hashlib.sha256(json.dumps(_stable(raw), sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        digest.update(f"{name}{tensors[name].shape}{tensors[name].dtype}".encode())
    for name in sorted(backbone):
        if name.endswith(f".{family.router}.weight"):
            digest.update(backbone[name].read(model).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _stable(held) for key, held in value.items() if key not in VOLATILE_KEYS}
    return value


def _refuse_quantised(tensors: Mapping[str, TensorEntry], folder: Path) -> None:
    """Some releases say it in their tensors' names only. Nothing of them is read."""
    for name in tensors:
        for ending, layout in QUANTISED.items():
            if name.endswith(ending):
                raise CheckpointError(
                    f"{folder} is quantised ({layout}: it holds {name}), which is not run; "
                    "use the unquantised checkpoint"
                )


def _match(
    model: nn.Module, tensors: Mapping[str, TensorEntry], tied: Mapping[str, str], folder: Path
) -> dict[str, TensorSource]:
    _refuse_quantised(tensors, folder)
    sources, surplus = tensor_sources(model, tensors)
    wanted = [name for name in model.state_dict(keep_vars=True) if name not in tied]
    missing = sorted(name for name in wanted if name not in sources)
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    if surplus:
        more = f" and {len(surplus) - 1} more" if surplus[1:] else ""
        raise CheckpointError(f"{folder} holds {surplus[0]}{more}, which a {model.config.model_type} does not have")  # type: ignore[union-attr]
    return {name: sources[name] for name in wanted}


def _check_shapes(model: nn.Module, backbone: Mapping[str, TensorSource], folder: Path) -> None:
    held = model.state_dict(keep_vars=True)
    for name, source in backbone.items():
        if source.shape != tuple(held[name].shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {list(source.shape)}, the config asks {list(held[name].shape)}"
            )


def _spec(
    config: Any, family: Family, modules: Mapping[int, tuple[str, nn.Module]], layout: ExpertLayout, digest: str
) -> ModelSpec:
    text = config.get_text_config()
    path, module = next(iter(modules.values()))
    down = module.get_parameter("down_proj")
    experts = len(layout.ranges) // len(modules)
    return ModelSpec(
        family=family.model_type,
        num_layers=text.num_hidden_layers,
        moe_layers=tuple(modules),
        num_experts=experts,
        top_k=_top_k(text, path, experts),
        hidden_size=text.hidden_size,
        expert_width=int(down.shape[1 if getattr(module, "is_transposed", False) else 2]),
        fingerprint=digest,
    )


def _top_k(text: Any, path: str, experts: int) -> int:
    for key in TOP_K_KEYS:
        value = getattr(text, key, None)
        if isinstance(value, (list, tuple)):
            value = max(value)
        if isinstance(value, int) and value > experts:
            raise CheckpointError(f"the config says that a token takes {value} of the {experts} experts of {path}")
        if isinstance(value, int) and value > 0:
            return value
    raise CheckpointError(f"the config does not say how many experts of {path} a token takes ({', '.join(TOP_K_KEYS)})")
