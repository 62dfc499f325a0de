"""Several turns on one KV cache: what was said, its pictures, and which tokens the cache holds.

Each turn writes the whole conversation in the chat template again and keeps the cache as far as its tokens are the
same: all of it, unless a template rewrites earlier turns (thoughts are left out, say). So the answer is that of the
whole conversation asked at once, whatever the template does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vismmoe.models.kv import can_be_cut, cut
from vismmoe.models.prompt import Prompt, Words, whole_images, without_start
from vismmoe.request import GenerationResult, Message, Request
from vismmoe.session import NOTHING, Past

OnText = Callable[[str], None]


def in_words(messages: Sequence[Message]) -> tuple[Words, ...]:
    """The same with a mark in place of each picture."""
    return tuple(
        Words(said.role, tuple(part if isinstance(part, str) else None for part in said.parts)) for said in messages
    )


class Conversation:
    """Made by Engine.converse(). Its cache takes memory until it is closed, or forgotten."""

    def __init__(self, answer: Callable[[Conversation, Request, OnText | None], GenerationResult]) -> None:
        self.messages: tuple[Message, ...] = ()  # answered ones and their answers
        self.images: tuple[Image.Image, ...] = ()  # of all messages, as the vision tower saw them
        self._answer = answer
        self._grid: tuple[tuple[int, int], ...] = ()
        self.close()

    def ask(self, request: Request, on_text: OnText | None = None) -> GenerationResult:
        """Answer the next message. The request's settings are those of this turn: a keep ratio is that of its images.

        Raises what Engine.generate raises; the conversation then is as it was, and the next turn computes it anew.
        """
        return self._answer(self, request, on_text)

    def close(self) -> None:
        """Let the cache go. A later turn computes the conversation anew."""
        self.cache: Any = None
        self._ids: list[int] = []  # tokens whose keys and values the cache holds
        self._kept: Tensor | None = None  # positions of those that deeper layers hold; None: all
        self._visual = torch.zeros(0, dtype=torch.int64)  # positions of the visual tokens among them

    @property
    def cached_tokens(self) -> int:
        return len(self._ids)

    def resume(self, prompt: Prompt, processor: Any, prefix: int) -> tuple[Past, Prompt, Any]:
        """What of `prompt`, the whole conversation, is there; what is new; the cache, None for a new one.

        prefix: decoder layers that hold every token. The cache is cut to what is still true.
        """
        held = self._still_true(prompt)
        rest = without_start(prompt, processor, held) if held else None
        if rest is None or (held < len(self._ids) and not can_be_cut(self.cache)):
            self.close()
            return NOTHING, prompt, None
        self._cut(held, prefix)
        visual = len(self._visual)
        dropped = 0 if self._kept is None else held - len(self._kept)
        return Past(held, self._kept, visual, visual - dropped), rest, self.cache

    def remember(self, request: Request, images: Sequence[Image.Image], answer: str, prompt: Prompt) -> None:
        """A turn is over. images: of the whole conversation; prompt: the whole one."""
        self.messages = (*self.messages, *request.messages, Message("assistant", (answer,)))
        self.images = tuple(images)
        self._grid = prompt.grid
        self._visual = prompt.visual_positions

    def keep(self, cache: Any, ids: Sequence[int], kept: Tensor | None, known: int) -> None:
        """What the cache holds now. kept: which of the first `known` tokens deeper layers hold; None: all."""
        held = cache.get_seq_length()
        self.cache, self._ids = cache, list(ids)[:held]
        self._kept = None if kept is None else torch.cat((kept.cpu(), torch.arange(known, held)))

    def _still_true(self, prompt: Prompt) -> int:
        """How many of the prompt's first tokens are those in the cache, whole images of the same shape only. At least
        one token is left to compute."""
        ids = prompt.inputs["input_ids"][0].tolist()
        same = next((place for place, (a, b) in enumerate(zip(ids, self._ids, strict=False)) if a != b), None)
        held = min(len(ids) - 1, len(self._ids)) if same is None else same
        for image, (now, before) in enumerate(zip(prompt.grid, self._grid, strict=False)):
            if now != before:
                held = min(held, int(prompt.visual_positions[prompt.image_index == image][0]))
        return whole_images(prompt, held)

    def _cut(self, held: int, prefix: int) -> None:
        """Keep the first `held` tokens."""
        if held == len(self._ids):
            return
        if self._kept is not None:
            self._kept = self._kept[self._kept < held]
        deep = held if self._kept is None else len(self._kept)
        layers = len(self.cache.layers)
        cut(self.cache, [held if layer < prefix else deep for layer in range(layers)])
        self._ids = self._ids[:held]
        self._visual = self._visual[self._visual < held]
