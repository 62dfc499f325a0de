"""What of a prefill decode is likely to want again: the experts of its text tokens (ours).

Visual tokens scatter over nearly all experts, and the answer's tokens are text. On the reference model 30 experts a
layer, chosen so, hold 94 % of what the first decoded token asks for; the last token's eight hold 43 %, the 30 busiest
of all tokens 52 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vismmoe.experts.cache import ExpertCache


def working_set(top_k_index: Tensor, visual_rows: Tensor, limit: int) -> list[int]:
    """At most `limit` experts of one layer, the likeliest first: the last token's, then by text tokens, then by all.

    top_k_index: (T, k) choices; visual_rows: (V,) int64 rows of the visual tokens among the T.
    """
    chosen = top_k_index.cpu()
    tokens, k = chosen.shape
    weight = torch.ones(tokens)
    weight[visual_rows.cpu()] = 1.0 / (1 + tokens)  # all of them together count less than one text token
    weight[-1] += tokens
    score = torch.zeros(int(chosen.max()) + 1)
    score.index_add_(0, chosen.flatten(), weight.repeat_interleave(k))
    best = score.topk(min(limit, len(score)))
    return [expert for value, expert in zip(best.values.tolist(), best.indices.tolist(), strict=True) if value > 0]


def rooms(cache: ExpertCache, deep_layers: Sequence[int], top_k: int) -> dict[int, int]:
    """Experts of each layer that may last, so that what passes through still has slabs; the last token's in any case.

    The first layer has twice the room: its misses are the only ones that nobody can foresee.
    """
    share = (cache.slabs - cache.passage) // (len(deep_layers) + 1)
    found = {layer: max(top_k, share) for layer in deep_layers}
    if deep_layers:
        found[deep_layers[0]] = max(top_k, 2 * share)
    return found
