"""What the trained model can do and how it routes, on scenes that it has never seen."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3VLMoeForConditionalGeneration

from vismmoe_training.reference.dialogue import IGNORED, Branch, DialogueBatch, DialogueEncoder, token_grid
from vismmoe_training.reference.pool import build_pool
from vismmoe_training.reference.routing import RoutingFigures, RoutingMeter
from vismmoe_training.reference.whole import answer_logits, decode, encode_pool, watching_routers
from vismmoe_training.scenes import STYLES, SceneSpec, ask


@dataclass(frozen=True)
class Measurement:
    """Exact match by question style on held-out scenes, and routing figures."""

    scenes: int
    asked: dict[str, int]
    right: dict[str, int]
    misses: tuple[tuple[str, str, str], ...]  # question, right answer, given answer
    routing: RoutingFigures

    @property
    def by_style(self) -> dict[str, float]:
        """Exact match of each style."""
        return {style: self.right.get(style, 0) / count for style, count in self.asked.items()}

    @property
    def overall(self) -> float:
        """Mean of the styles, each with the same weight."""
        return sum(self.by_style.values()) / len(self.by_style)


@torch.no_grad()
def measure(
    model: Qwen3VLMoeForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    *,
    scenes: int = 512,
    seed: int = 424242,
    batch: int = 16,
) -> Measurement:
    """One question of each style about each of `scenes` scenes of the full size range.

    The whole answer with its end token must come out as the most likely one at every position, which for greedy
    decoding is the same as generating it.
    """
    model.eval()
    pool = build_pool(scenes, seed, [SceneSpec()])
    features = encode_pool(model, pool)
    encoder, rng = DialogueEncoder(tokenizer), np.random.default_rng(seed)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    misses: list[tuple[str, str, str]] = []
    text = model.config.text_config
    meter = RoutingMeter(text.num_hidden_layers, text.num_experts)
    order = sorted(range(scenes), key=lambda index: pool[index].tokens)
    for start in range(0, scenes, batch):
        chosen = order[start : start + batch]
        branches = [[encoder.branch(q) for q in ask(pool[i].scene, rng, STYLES, 1)] for i in chosen]
        dialogues = encoder.batch([token_grid(pool[i].scene) for i in chosen], branches)
        routed: list[tuple[Tensor, ...]] = []
        with watching_routers(model, routed):
            hidden = decode(model, dialogues, torch.cat([features[i] for i in chosen], dim=1).float())
        guesses = answer_logits(model, dialogues, hidden).argmax(-1)
        for branch, guess in _answers(branches, dialogues, guesses):
            asked[branch.style] += 1
            right[branch.style] += guess == list(branch.answer)
            if guess != list(branch.answer) and len(misses) < 200:
                misses.append(tuple(tokenizer.decode(ids) for ids in (branch.prompt, branch.answer, guess)))
        _note_routing(model, meter, dialogues, routed)
    return Measurement(scenes, dict(asked), dict(right), tuple(misses), meter.figures())


def _answers(
    branches: Sequence[Sequence[Branch]], dialogues: DialogueBatch, guesses: Tensor
) -> list[tuple[Branch, list[int]]]:
    """The guessed tokens of each branch; labelled positions come in the branches' order."""
    assert int((dialogues.labels != IGNORED).sum()) == guesses.numel()
    flat = [branch for own in branches for branch in own]
    return list(zip(flat, map(list, _split(guesses.tolist(), [len(b.answer) for b in flat])), strict=True))


def _split(values: list[int], lengths: Sequence[int]) -> list[list[int]]:
    ends = np.cumsum([0, *lengths]).tolist()
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _note_routing(
    model: Qwen3VLMoeForConditionalGeneration,
    meter: RoutingMeter,
    dialogues: DialogueBatch,
    routed: Sequence[tuple[Tensor, ...]],
) -> None:
    """Add each request (a picture with its first question) of a batch to the meter."""
    rows, length = dialogues.branch.shape
    chosen = torch.stack([ids for _, _, _, ids in routed]).view(len(routed), rows, length, -1)
    guessed = torch.stack(_next_gate(model, routed)).view(len(routed) - 1, rows, length, -1)
    for row in range(rows):
        keep = (dialogues.branch[row] == 0) | (dialogues.branch[row] == 1)
        visual = dialogues.visual[row][keep]
        meter.add(chosen[:, row, keep], visual, ~visual)
        meter.add_next_gate(guessed[:, row, keep], chosen[1:, row, keep])


def _next_gate(model: Qwen3VLMoeForConditionalGeneration, routed: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
    """What each next layer's router would choose if it saw this layer's state, by its own norm's weights."""
    layers = model.model.language_model.layers
    guesses = []
    for index, (hidden, *_rest) in enumerate(routed[:-1]):
        own, following = (layers[i].post_attention_layernorm.weight for i in (index, index + 1))
        logits = (hidden.reshape(-1, hidden.shape[-1]) / own * following) @ layers[index + 1].mlp.gate.weight.t()
        guesses.append(logits.topk(routed[0][3].shape[-1], dim=-1).indices)
    return guesses
