"""The KV cache of one request, allocated once, or once a turn of a conversation.

transformers' own grows by concatenation: each token copies all of them, and the pieces that it frees are of ever other
sizes, so that the process holds a good part of them twice. Here each layer takes the room for the whole answer at its
first forward and hands out views of what is filled; pages that no token has reached yet take no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import utils

CACHE_ARGUMENT: str = getattr(utils, "ALL_CACHE_NAMES", ("past_key_values",))[0]  # its name has changed in version 5


def expect(cache: Any, new_tokens: int) -> None:
    """Another turn: its prompt and `new_tokens` more will come."""
    for layer in cache.layers:
        if isinstance(layer, _AllocatedLayer):
            layer.new_tokens = new_tokens


def holds_every_token(cache: Any, layer: int) -> bool:
    """Whether the layer has keys and values of its own for each token that it has seen."""
    return isinstance(cache.layers[layer], _AllocatedLayer)


def can_be_cut(cache: Any) -> bool:
    """Whether tokens at the end can be forgotten: a running state and a sliding window hold no single tokens."""
    return all(isinstance(layer, _AllocatedLayer) for layer in cache.layers)


def cut(cache: Any, lengths: Sequence[int]) -> None:
    """Forget all but the first lengths[layer] tokens of each layer."""
    for layer, length in zip(cache.layers, lengths, strict=True):
        if layer.get_seq_length() > length:
            layer.crop(length - layer.get_seq_length())


def allocated_cache(config: Any, new_tokens: int, *, whole: bool = False) -> Any:
    """A cache for `generate()` with room for the prompt and `new_tokens` more. config: the model's, with its decoder's.

    Layers of other kinds (a sliding window, a recurrent state) stay as transformers makes them: they do not grow.
    whole: sliding windows keep all tokens too. Where tokens are dropped, what lies in the window is told by original
    positions (the mask), not by how many tokens are cached.
    """
    cache = DynamicCache(config=config)
    kinds = (DynamicLayer, DynamicSlidingWindowLayer) if whole else (DynamicLayer,)
    cache.layers = [_AllocatedLayer(new_tokens) if type(layer) in kinds else layer for layer in cache.layers]
    return cache


class _AllocatedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values (B, heads, tokens, head size) are views of a larger block of memory."""

    keys: Any
    values: Any

    def __init__(self, new_tokens: int) -> None:
        super().__init__()
        self.new_tokens = new_tokens  # that are to come after the next prompt
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, head size); returns all keys and values so far."""
        held = self.get_seq_length()
        if held == 0:
            self.lazy_initialization(key_states, value_states)
        total = held + key_states.shape[-2]
        if self._room is None or total > self._room[0].shape[-2] or not self._in_room(key_states.shape[0]):
            self._room = (
                self._moved(self.keys, key_states, held, total),
                self._moved(self.values, value_states, held, total),
            )
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., held:total, :] = states
        self.keys, self.values = (room[..., :total, :] for room in self._room)
        return self.keys, self.values

    def _moved(self, before: Tensor, states: Tensor, held: int, total: int) -> Tensor:
        """Room for what comes, with what is held already."""
        batch, heads, _, size = states.shape
        room = states.new_empty(batch, heads, total + self.new_tokens, size)
        if held:
            room[..., :held, :] = before
        return room

    def _in_room(self, batch: int) -> bool:
        """Whether what is held lies in the room: not after a reordering, or a reset."""
        assert self._room is not None
        if self._room[0].shape[0] != batch:
            return False
        return self.get_seq_length() == 0 or bool(self.keys.data_ptr() == self._room[0].data_ptr())
