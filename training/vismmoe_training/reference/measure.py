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
from vismmoe_training.reference.whole import answer_logits, decode, early_logits, encode_pool, watching_routers
from vismmoe_training.scenes import STYLES, Scene, SceneSpec, ask


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


@dataclass(frozen=True)
class HeldOut:
    """Scenes of the full size range that no training sees, and what a finished vision tower says of them."""

    scenes: tuple[Scene, ...]
    features: tuple[Tensor, ...]  # float16 (1 + deepstack, N, H) each
    seed: int


def hold_out(model: Qwen3VLMoeForConditionalGeneration, scenes: int = 512, seed: int = 424242) -> HeldOut:
    """Draw and encode held-out scenes."""
    pool = build_pool(scenes, seed, [SceneSpec()])
    return HeldOut(tuple(each.scene for each in pool), tuple(encode_pool(model, pool)), seed)


@torch.no_grad()
def measure(
    model: Qwen3VLMoeForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, held: HeldOut, *, batch: int = 16
) -> Measurement:
    """One question of each style about each held-out scene.

    The whole answer with its end token must come out as the most likely one at every position, which for greedy
    decoding is the same as generating it.
    """
    scenes, features = held.scenes, held.features
    encoder, rng = DialogueEncoder(tokenizer), np.random.default_rng(held.seed)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    misses: list[tuple[str, str, str]] = []
    text = model.config.text_config
    meter = RoutingMeter(text.num_hidden_layers, text.num_experts)
    order = sorted(range(len(scenes)), key=lambda index: features[index].shape[1])
    for start in range(0, len(scenes), batch):
        chosen = order[start : start + batch]
        branches = [[encoder.branch(q) for q in ask(scenes[i], rng, STYLES, 1)] for i in chosen]
        dialogues = encoder.batch([token_grid(scenes[i]) for i in chosen], branches)
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
    return Measurement(len(scenes), dict(asked), dict(right), tuple(misses), meter.figures())


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
    early = early_logits(model, [inputs for inputs, *_ in routed])
    guessed = torch.stack([logits.topk(chosen.shape[-1], dim=-1).indices for logits in early])
    guessed = guessed.view(len(early), rows, length, -1)
    for row in range(rows):
        keep = (dialogues.branch[row] == 0) | (dialogues.branch[row] == 1)
        visual = dialogues.visual[row][keep]
        meter.add(chosen[:, row, keep], visual, ~visual)
        meter.add_next_gate(guessed[:, row, keep], chosen[1:, row, keep])
