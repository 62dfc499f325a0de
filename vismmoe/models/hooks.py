"""Where one request's Session looks into and changes a stock transformers model: forward hooks, no subclassing.

Compression (VisMMoE §4.1) works by pre-hooks: the first decoder layer after the prefix drops rows of the hidden
states; it and all deeper ones take the rows of the rotary embeddings and of the mask that are left. The KV cache's
length is read from layer 0, which holds the whole prompt, so decode positions stay right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vismmoe.models.catalogue import Family, Vision
from vismmoe.models.skeleton import named_class


class Observer(Protocol):
    """What a request's Session offers to the hooks."""

    wants_saliency: bool
    known_tokens: int  # of earlier turns and of this one's prompt: those among which some may be dropped
    prompt_inputs: Mapping[str, Tensor]  # what the processor made of the request

    def begin_vision(self) -> None: ...
    def end_vision(self) -> None: ...
    def see_saliency(self, received: Tensor) -> None:
        """(N,) attention received by each visual token of the request."""

    def begin_forward(self, embeds: Tensor | None) -> None:
        """(1, T, H) what the decoder receives in this forward; None: it embeds the tokens itself."""

    def end_forward(self) -> None: ...
    def compress(self) -> None:
        """The prefix has run: decide on the kept tokens, once a request."""

    def kept(self) -> Tensor | None:
        """(M,) int64 ascending rows of this turn's prompt that deeper layers see; None: all of them."""

    def held(self) -> Tensor | None:
        """(C,) int64 ascending: which of the known tokens deeper layers have keys of; None: of all of them."""

    def kept_visual(self) -> Tensor | None:
        """(K,) int64 ascending indices of the kept ones among the visual tokens."""


class _Here(threading.local):
    """What the hooks carry from one to the next within a forward."""

    deepstack: tuple[Tensor, list[Tensor]] | None = None  # what is still to be added after the boundary


class StackHooks:
    """Installs the hooks once; each does nothing while `current()` is None."""

    def __init__(self, model: nn.Module, family: Family, boundary: int, current: Callable[[], Observer | None]) -> None:
        """boundary: first decoder layer that sees only the kept tokens."""
        self._current = current
        self._boundary = boundary
        self._here = _Here()  # requests that run in lock-step have a thread each
        self._install(model, family)

    def _install(self, model: nn.Module, family: Family) -> None:
        if family.vision is not None:
            self._watch_vision(model, family.vision)
        model.get_submodule(family.decoder).register_forward_pre_hook(self._before_decoder, with_kwargs=True)
        model.register_forward_hook(self._after_model)
        layers: Any = model.get_submodule(family.layers)
        for index in range(self._boundary, len(layers)):
            layers[index].register_forward_pre_hook(self._before_layer(index), with_kwargs=True)
            layers[index].register_forward_hook(self._after_layer(index))

    def _watch_vision(self, model: nn.Module, vision: Vision) -> None:
        tower = model.get_submodule(vision.tower)
        tower.register_forward_pre_hook(self._before_vision)
        tower.register_forward_hook(self._after_vision)
        if vision.saliency_attention is not None:
            config: Any = model.config
            self._merge = int(config.vision_config.spatial_merge_size)
            self._saliency = named_class(vision.saliency)
            attention = submodule(model, vision.saliency_attention)
            attention.register_forward_pre_hook(self._at_vision_attention, with_kwargs=True)

    def _before_vision(self, module: nn.Module, args: Any) -> None:
        if (session := self._current()) is not None:
            session.begin_vision()

    def _after_vision(self, module: nn.Module, args: Any, output: Any) -> None:
        if (session := self._current()) is not None:
            session.end_vision()

    def _at_vision_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self._current()
        if session is None or not session.wants_saliency:
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        session.see_saliency(self._saliency(module, hidden, kwargs, self._merge, session.prompt_inputs))

    def _before_decoder(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        session = self._current()
        self._here.deepstack = None
        if session is None:
            return None
        session.begin_forward(kwargs.get("inputs_embeds"))
        embeds = kwargs.get("deepstack_visual_embeds")
        if embeds is None or len(embeds) <= self._boundary:
            return None
        # DeepStack reaches past the prefix: the model adds up to the boundary, we add the rest to the kept rows.
        self._here.deepstack = (kwargs["visual_pos_masks"], list(embeds))
        return args, {**kwargs, "deepstack_visual_embeds": list(embeds[: self._boundary])}

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._here.deepstack = None
        if (session := self._current()) is not None:
            session.end_forward()

    def _before_layer(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            session = self._current()
            if session is None:
                return None
            if index == self._boundary:
                session.compress()
            held = session.held()
            if held is None:
                return None
            hidden = args[0] if args else kwargs.pop("hidden_states")
            kept = session.kept() if hidden.shape[1] > 1 else None
            if index == self._boundary and kept is not None:
                hidden = hidden[:, kept]
            more = args[1:] if kept is None else [_pruned_rows(value, hidden, kept) for value in args[1:]]
            return (hidden, *more), pruned_kwargs(kwargs, kept, held, session.known_tokens)

        return hook

    def _after_layer(self, index: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
            session = self._current()
            pending = self._here.deepstack
            if session is None or pending is None or index >= len(pending[1]):
                return None
            mask, embeds = pending
            return add_deepstack(output, mask, embeds[index], session.kept(), session.kept_visual())

        return hook


def submodule(model: nn.Module, path: str) -> nn.Module:
    """get_submodule that counts from the end too: "blocks.-1.attn"."""
    found: Any = model
    for part in path.split("."):
        found = found[int(part)] if part.lstrip("-").isdigit() else getattr(found, part)
    return found  # type: ignore[no-any-return]


def pruned_kwargs(kwargs: dict[str, Any], kept: Tensor | None, held: Tensor, known: int) -> dict[str, Any]:
    """The layer's keyword arguments for the kept tokens: rotary (cos, sin) (1, T, d) or what stands for them,
    positions (1, T), mask over the original positions.

    kept: rows of this forward that are left, None in decode; held: which of the first `known` cached tokens have keys
    in this layer: the mask has one column for each of them and for each later token.
    """
    out = dict(kwargs)
    if kept is not None:
        if "position_embeddings" in kwargs:
            out["position_embeddings"] = _pruned_rotary(kwargs["position_embeddings"], kept)
        if kwargs.get("position_ids") is not None:
            out["position_ids"] = kwargs["position_ids"][..., kept]  # (1, T), or (3, 1, T) for time, row and column
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:  # (1, cached tokens): layers with a running state
        out["attention_mask"] = mask if kept is None else torch.cat((mask[:, held], mask[:, known:]), dim=-1)
    elif mask is not None:
        rows = mask if kept is None else mask[:, :, kept]
        out["attention_mask"] = torch.cat((rows[..., held], rows[..., known:]), dim=-1)
    return out


def _pruned_rotary(rotary: Any, kept: Tensor) -> Any:
    """(cos, sin), each (1, T, d); one complex tensor (1, T, d); or None in a layer without positions."""
    if rotary is None:
        return None
    return rotary[:, kept] if isinstance(rotary, Tensor) else tuple(part[:, kept] for part in rotary)


def _pruned_rows(value: Any, hidden: Tensor, kept: Tensor) -> Any:
    """A layer's further input with a row for each token of the prompt, (1, T, ...); anything else as it is."""
    per_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] > hidden.shape[1]
    return value[:, kept] if per_token else value


def add_deepstack(
    hidden: Tensor, mask: Tensor, embeds: Tensor, kept: Tensor | None, kept_visual: Tensor | None
) -> Tensor:
    """What the model does after its first layers, for rows that compression left.

    hidden: (1, M, H); mask: (1, T) visual positions of the prompt; embeds: (N, H) DeepStack features.
    """
    rows = mask if kept is None else mask[:, kept]
    features = embeds if kept_visual is None else embeds[kept_visual]
    out = hidden.clone()
    out[rows] = out[rows] + features.to(out.dtype)
    return out
