"""Stage one: the vision tower learns to name what every visual token shows, in the decoder's own vocabulary.

A visual embedding is pushed towards the token embeddings of the words that describe it ("circle", "red", "left"), so
that the decoder, once it joins, finds pictures and words in one space. What has no word (where an object's centre lies,
the digits of a number) gets free linear rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3VLMoeForConditionalGeneration

from vismmoe_training.reference.pool import LABELS, OUTLINE_VALUES
from vismmoe_training.reference.sheets import READING_TARGETS
from vismmoe_training.scenes import CELLS, CHARACTERS, COLOUR_NAMES, KINDS, WORDS

OUTLINE_WEIGHT = 0.5
SHARPNESS = 4.0  # of the inner products
DEEPSTACK_TARGETS = ("kind_spaced", "colour", "row", "column", "left_character", "right_character", "place")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")


@dataclass(frozen=True)
class Target:
    """One classification per visual token: which label, and the words of its classes (class 0 is "nothing")."""

    label: str
    words: tuple[str, ...]  # empty: free rows only
    free_classes: int  # rows without a word, class 0 included
    weight: float = 1.0


def targets() -> Mapping[str, Target]:
    """All targets; a word stands both as it follows a space and as an answer begins with it."""
    pairs = {
        "kind": ("kind", KINDS),
        "colour": ("colour", COLOUR_NAMES),
        "row": ("cell", ROWS),
        "column": ("cell", COLUMNS),
    }
    worded = {
        f"{name}{suffix}": Target(label, tuple(form + word for word in words), 1, 3.0 if name == "kind" else 1.0)
        for name, (label, words) in pairs.items()
        for suffix, form in (("", ""), ("_spaced", " "))
    }
    return worded | {
        "text": Target("text", WORDS, 2),
        "tens": Target("tens", (), 11),
        "ones": Target("ones", (), 11),
        "left_character": Target("left_character", (), 1 + len(CHARACTERS)),
        "right_character": Target("right_character", (), 1 + len(CHARACTERS)),
        "place": Target("place", (), 6),
        "centre": Target("count_centre", (), 2),
    }


def class_of(name: str, target: Target, labels: Tensor) -> Tensor:
    """(len(LABELS), N) -> (N,) class of each token for one target."""
    value = labels[LABELS.index(target.label)].long()
    if name.startswith("row"):
        return torch.where(value > 0, 1 + (value - 1) // len(COLUMNS), 0)
    if name.startswith("column"):
        return torch.where(value > 0, 1 + (value - 1) % len(COLUMNS), 0)
    return value


class TokenNamer(nn.Module):
    """Visual embeddings (N, H) -> logits of every target, by inner product with word embeddings and free rows."""

    def __init__(self, hidden_size: int, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        assert len(CELLS) == len(ROWS) * len(COLUMNS)
        self.targets = targets()
        self.free = nn.ParameterDict(
            {
                name: nn.Parameter(torch.randn(t.free_classes, hidden_size) / hidden_size**0.5)
                for name, t in self.targets.items()
            }
        )
        self.ids = {
            name: torch.tensor([tokenizer(word).input_ids[0] for word in t.words], dtype=torch.long)
            for name, t in self.targets.items()
        }

    def loss(
        self, visual: Tensor, embeddings: Tensor, labels: Tensor, names: Sequence[str] | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """Weighted mean of the targets' cross-entropies, and the share of right classes where there is something."""
        total, weights, accuracy = visual.new_zeros(()), 0.0, {}
        for name in names or self.targets:
            target = self.targets[name]
            rows = torch.cat([self.free[name], embeddings[self.ids[name]]])
            logits, wanted = SHARPNESS * visual @ rows.t(), class_of(name, target, labels)
            shown = wanted > 0
            each = nn.functional.cross_entropy(logits, wanted, reduction="none")
            # Most tokens show nothing of the sort: those that do weigh as much as all the others together.
            total = total + target.weight * (each[~shown].mean() + (each * shown).sum() / shown.sum().clamp(min=1)) / 2
            weights += target.weight
            accuracy[name] = float((logits.argmax(-1) == wanted)[shown].float().mean()) if shown.any() else 1.0
        return total / weights, accuracy


class OutlineReader(nn.Module):
    """Visual embeddings (N, H) -> what part of its object each token shows (see `token_outlines`).

    Kinds differ by their outline alone. Asked for kinds only, the tower spends hundreds of steps before it notices
    outlines at all; asked for the pieces as well, it puts them together soon.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, OUTLINE_VALUES)

    def loss(self, visual: Tensor, outlines: Tensor) -> Tensor:
        """Mean over the tokens that show an object; `outlines` (N, OUTLINE_VALUES)."""
        shown = outlines[:, -1] > 0
        guess, wanted = self.linear(visual[shown]), outlines[shown]
        inside = nn.functional.binary_cross_entropy_with_logits(guess[:, :16], wanted[:, :16])
        return inside + nn.functional.smooth_l1_loss(guess[:, 16:], wanted[:, 16:])


class VisionStage(L.LightningModule):
    """Trains the vision tower, its mergers and the token embeddings; the decoder is left alone."""

    def __init__(
        self,
        model: Qwen3VLMoeForConditionalGeneration,
        namer: TokenNamer,
        *,
        steps: int,
        learning_rate: float = 2e-3,
        deepstack_weight: float = 0.25,
    ) -> None:
        super().__init__()
        self.model, self.namer = model, namer
        features = 1 + len(model.config.vision_config.deepstack_visual_indexes)
        self.readers = nn.ModuleList([OutlineReader(model.config.text_config.hidden_size) for _ in range(features)])
        self.steps, self.learning_rate, self.deepstack_weight = steps, learning_rate, deepstack_weight

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor, Tensor | None], index: int) -> Tensor:
        """One batch of (pixels, grids, labels, outlines); no outlines: a sheet of writing."""
        pixels, grids, labels, outlines = batch
        names = READING_TARGETS if outlines is None else tuple(self.namer.targets)
        seen = self.model.model.visual(pixels, grid_thw=grids)
        words = self.model.model.language_model.embed_tokens.weight
        loss, accuracy = self.namer.loss(seen.pooler_output, words, labels, names)
        self.log("vision/loss" if outlines is not None else "vision/reading_loss", loss, prog_bar=True)
        early = [name for name in DEEPSTACK_TARGETS if name in names]
        for feature in seen.deepstack_features:
            loss = loss + self.deepstack_weight * self.namer.loss(feature, words, labels, early)[0]
        self.log_dict({f"vision/{name}": value for name, value in accuracy.items()})
        if outlines is None:
            return loss
        features = [seen.pooler_output, *seen.deepstack_features]
        parts = [reader.loss(feature, outlines) for reader, feature in zip(self._readers(), features, strict=True)]
        self.log("vision/outline", parts[1])
        return loss + OUTLINE_WEIGHT * torch.stack(parts).sum()

    def _readers(self) -> list[OutlineReader]:
        return [reader for reader in self.readers if isinstance(reader, OutlineReader)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with one cycle of the learning rate."""
        words = self.model.model.language_model.embed_tokens
        parts: list[nn.Module] = [self.model.model.visual, words, self.namer, self.readers]
        trained = [parameter for part in parts for parameter in part.parameters()]
        optimizer = torch.optim.AdamW(trained, lr=self.learning_rate, weight_decay=0.01, fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.learning_rate, total_steps=self.steps, pct_start=0.06
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
