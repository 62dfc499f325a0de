"""A prompt that goes through each layer in pieces: what a layer computes on the way is then that of a piece.

Layer by layer, not piece by piece through the whole stack: the layers of the prefix are through with every token before
the compressor looks at them, DeepStack adds to whole prompts, and stock generate() notices nothing. A piece sees the
keys of all earlier ones in the cache. Matrix products of fewer rows round differently, so that logits agree with those
of the whole prompt within rounding, and resident with streamed ones byte for byte. Experts that do not stay in the
slabs are read again for each piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vismmoe.models.catalogue import Family
from vismmoe.models.kv import CACHE_ARGUMENT, holds_every_token

WHOLE = "some layers of this family take a prompt as a whole: --prefill-chunk changes nothing there"


class Chunked(Protocol):
    """What a request's Session offers."""

    prefill_chunk: int | None  # tokens in a piece; None: the whole prompt

    def begin_chunk(self, start: int, end: int | None) -> None:
        """The layer now runs its tokens from `start` to `end`; None: to the last one."""

    def note(self, sentence: str) -> None: ...


class ChunkedLayers:
    """Wraps the forward of each decoder layer once; hooks of a layer still see the whole prompt."""

    def __init__(self, model: nn.Module, family: Family, current: Callable[[], Chunked | None]) -> None:
        self._current = current
        layers: Any = model.get_submodule(family.layers)
        config: Any = model.config
        self._sdpa = config.get_text_config()._attn_implementation == "sdpa"
        for index, layer in enumerate(layers):
            layer.forward = self._wrapped(layer.forward, index)

    def _wrapped(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            session, tokens = self._current(), hidden_states.shape[1]
            if session is None or session.prefill_chunk is None or tokens <= session.prefill_chunk:
                return forward(hidden_states, *args, **kwargs)
            cache = kwargs.get(CACHE_ARGUMENT)
            if args or cache is None or not holds_every_token(cache, index) or not self._can_be_parted(kwargs):
                session.note(WHOLE)
                return forward(hidden_states, *args, **kwargs)
            past, pieces = cache.layers[index].get_seq_length(), []
            for start in range(0, tokens, session.prefill_chunk):
                end = min(tokens, start + session.prefill_chunk)
                session.begin_chunk(start, end)
                pieces.append(forward(hidden_states[:, start:end], **part_of(kwargs, start, end, past)))
            session.begin_chunk(0, None)
            return torch.cat(pieces, dim=1)

        return run

    def _can_be_parted(self, kwargs: dict[str, Any]) -> bool:
        known = ("position_embeddings", "position_ids", "attention_mask")
        mask = kwargs.get("attention_mask")
        masked = self._sdpa if mask is None else isinstance(mask, Tensor) and mask.dim() == 4
        return masked and not any(isinstance(held, Tensor) for name, held in kwargs.items() if name not in known)


def part_of(kwargs: dict[str, Any], start: int, end: int, past: int) -> dict[str, Any]:
    """A layer's keyword arguments for its tokens from `start` to `end`, after `past` cached ones."""
    out = dict(kwargs)
    rotary, positions, mask = (kwargs.get(name) for name in ("position_embeddings", "position_ids", "attention_mask"))
    if rotary is not None:
        cut = slice(start, end)
        out["position_embeddings"] = (
            rotary[:, cut] if isinstance(rotary, Tensor) else tuple(part[:, cut] for part in rotary)
        )
    if positions is not None:
        out["position_ids"] = positions[..., start:end]
    if mask is not None:
        out["attention_mask"] = mask[:, :, start:end, : past + end]
    elif past + start:  # without a mask the first row would see the first key only
        device = (rotary if isinstance(rotary, Tensor) else rotary[0]).device if rotary is not None else None
        rows, columns = torch.arange(start, end, device=device), torch.arange(past + end, device=device)
        out["attention_mask"] = (columns <= rows.unsqueeze(1) + past)[None, None]
    return out
