"""Scenes and questions as token batches: one picture, many questions, none of which sees another.

Each question with its answer is a *branch* behind the shared picture: an attention mask hides the branches from each
other and all of them start at the same position, so that training on twelve questions equals training on twelve
requests with one picture each, for the price of one picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vismmoe_training.scenes import Question, Scene

IGNORED = -100


def token_grid(scene: Scene, token_px: int = 16) -> tuple[int, int]:
    """Rows and columns of visual tokens of a scene's picture."""
    return scene.height_px // token_px, scene.width_px // token_px


@dataclass(frozen=True)
class Branch:
    """One question with its answer as token ids."""

    prompt: tuple[int, ...]  # text of the question up to and with the assistant's header
    answer: tuple[int, ...]  # the answer and the end-of-turn token
    style: str


@dataclass(frozen=True)
class DialogueBatch:
    """B pictures with their branches, padded to T tokens."""

    input_ids: Tensor  # (B, T) int64
    position_ids: Tensor  # (3, B, T) int64: time, row, column
    branch: Tensor  # (B, T) int64: 0 shared prefix, 1.. branches, -1 padding
    visual: Tensor  # (B, T) bool
    labels: Tensor  # (B, T) int64: the token that must follow, IGNORED elsewhere

    def to(self, device: torch.device) -> DialogueBatch:
        """The same batch on a device."""
        return DialogueBatch(**{name: value.to(device) for name, value in vars(self).items()})

    def mask(self) -> Tensor:
        """(B, 1, T, T) bool, True where a query (row) may look at a key (column)."""
        length = self.branch.shape[1]
        query, key = self.branch[:, :, None], self.branch[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        allowed = causal & ((key == 0) | (key == query)) & (key >= 0)
        return (allowed | torch.eye(length, dtype=torch.bool, device=query.device)).unsqueeze(
            1
        )  # padding looks at itself: no empty row


class DialogueEncoder:
    """Turns questions and picture grids into batches, with the ids that the chat template would give."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.head = self._ids("<|im_start|>user\n<|vision_start|>")
        self.tail = self._ids("<|vision_end|>")
        self.image = self._ids("<|image_pad|>")
        self.pad = int(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        self._seen: dict[str, tuple[int, ...]] = {}

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text).input_ids)

    def _remembered(self, text: str) -> tuple[int, ...]:
        if text not in self._seen:
            self._seen[text] = self._ids(text)
        return self._seen[text]

    def branch(self, question: Question) -> Branch:
        """Token ids of one question."""
        prompt = self._remembered(f"{question.prompt}<|im_end|>\n<|im_start|>assistant\n")
        return Branch(prompt, self._remembered(f"{question.answer}<|im_end|>"), question.style)

    def batch(self, grids: Sequence[tuple[int, int]], branches: Sequence[Sequence[Branch]]) -> DialogueBatch:
        """`grids`: rows and columns of visual tokens of each picture; `branches`: its questions."""
        rows = [self._row(grid, own) for grid, own in zip(grids, branches, strict=True)]
        length = max(row[0].shape[0] for row in rows)
        filled = [
            torch.stack([torch.nn.functional.pad(row[i], (0, length - row[i].shape[-1]), value=fill) for row in rows])
            for i, fill in ((0, self.pad), (1, 0), (2, -1), (3, IGNORED))
        ]
        ids, positions, branch, labels = filled
        return DialogueBatch(ids, positions.transpose(0, 1).contiguous(), branch, ids == self.image[0], labels)

    def _row(self, grid: tuple[int, int], branches: Sequence[Branch]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """ids (T,), positions (3, T), branch (T,), labels (T,) of one picture."""
        height, width = grid
        first = len(self.head)
        ids = [*self.head, *self.image * (height * width), *self.tail]
        image = torch.cartesian_prod(torch.arange(height), torch.arange(width)).t() + first
        image = torch.cat([torch.full((1, height * width), first), image])
        after = first + max(height, width)
        positions = [torch.arange(first).expand(3, -1), image, torch.full((3, 1), after)]
        owner, labels = [0] * len(ids), [IGNORED] * len(ids)
        for number, branch in enumerate(branches, start=1):
            own = [*branch.prompt, *branch.answer[:-1]]
            ids += own
            owner += [number] * len(own)
            labels += [IGNORED] * (len(branch.prompt) - 1) + list(branch.answer)
            positions.append((torch.arange(len(own)) + after + 1).expand(3, -1))
        return torch.tensor(ids), torch.cat(positions, dim=1), torch.tensor(owner), torch.tensor(labels)
