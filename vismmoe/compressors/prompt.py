"""Prompt-aware similarity: tokens that the question is about, beside those that are salient anyway."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from vismmoe.compressors.base import Method, best, check_count
from vismmoe.types import VisualTokens


@dataclass(frozen=True)
class PromptCompressor(Method):
    """By s + attention * r: r is how alike a token's state is to the question's, after the prefix, in [0, 1]."""

    attention: float = 1.0
    name: str = "prompt"

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """(count,) int64 sorted indices."""
        check_count(count, len(visual.saliency))
        return best(visual.saliency.float() + self.attention * relevance(visual), count).sort().values


def relevance(visual: VisualTokens) -> Tensor:
    """(N,) float32 in [0, 1]: the highest cosine with any token of the question, scaled over the visual tokens.

    Visual and text states are centred apart: what all of one kind share says nothing of a single token. Zeros where
    the request has no question or no prefix.
    """
    if visual.states is None or visual.prompt_states is None or not len(visual.prompt_states):
        return torch.zeros_like(visual.saliency, dtype=torch.float32)
    tokens, words = visual.states.float(), visual.prompt_states.float()
    tokens, words = tokens - tokens.mean(0), words - words.mean(0)
    found = (F.normalize(tokens, dim=-1) @ F.normalize(words, dim=-1).T).amax(-1)
    if not len(found):
        return found
    low, high = found.min(), found.max()
    return (found - low) / (high - low).clamp(min=1e-9)
