"""The KV cache of one request, allocated once.

transformers' own grows by concatenation: each token copies all of them, and the pieces that it frees are of ever other
sizes, so that the process holds a good part of them twice. Here each layer takes the room for the whole answer at its
first forward and hands out views of what is filled; pages that no token has reached yet take no memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import utils

CACHE_ARGUMENT: str = getattr(utils, "ALL_CACHE_NAMES", ("past_key_values",))[0]  # its name has changed in version 5


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

    def __init__(self, new_tokens: int) -> None:
        super().__init__()
        self._new_tokens = new_tokens
        self._room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (B, heads, T, head size); returns all keys and values so far."""
        held = self.get_seq_length()
        if held == 0:
            self.lazy_initialization(key_states, value_states)
            self._room = (self._allocate(key_states), self._allocate(value_states))
        total = held + key_states.shape[-2]
        if self._room is None or total > self._room[0].shape[-2] or not self._in_room(key_states.shape[0]):
            grown: tuple[Tensor, Tensor] = super().update(key_states, value_states)
            return grown
        for room, states in zip(self._room, (key_states, value_states), strict=True):
            room[..., held:total, :] = states
        self.keys, self.values = (room[..., :total, :] for room in self._room)
        return self.keys, self.values

    def _allocate(self, states: Tensor) -> Tensor:
        batch, heads, tokens, size = states.shape
        return states.new_empty(batch, heads, tokens + self._new_tokens, size)

    def _in_room(self, batch: int) -> bool:
        """Whether what is held lies in the room: not after a reordering, or a reset."""
        assert self._room is not None
        if self.get_seq_length() == 0:
            return True
        return bool(self.keys.data_ptr() == self._room[0].data_ptr()) and self._room[0].shape[0] == batch
