"""Stage two: the decoder learns to answer about pictures that the frozen vision tower describes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import Qwen3VLMoeForConditionalGeneration
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from vismmoe_training.reference.dialogue import IGNORED, DialogueBatch
from vismmoe_training.reference.pool import PooledScene, pixel_values


@dataclass(frozen=True)
class BalanceWeights:
    """Weights of the balance terms (Switch form, per layer, mean over layers), visual and text tokens apart."""

    visual: float = 0.05
    text: float = 0.05


@torch.no_grad()
def encode_pool(
    model: Qwen3VLMoeForConditionalGeneration, pool: Sequence[PooledScene], batch: int = 32
) -> list[Tensor]:
    """What the frozen tower says of each scene: float16 (1 + deepstack, N, H), the main embedding first."""
    order = sorted(range(len(pool)), key=lambda index: pool[index].tokens)
    features: dict[int, Tensor] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        pixels, grids = pixel_values([pool[i] for i in chosen])
        seen = model.model.visual(pixels, grid_thw=grids)
        stacked = torch.stack([seen.pooler_output, *seen.deepstack_features]).half()
        pieces = torch.split(stacked, [pool[i].tokens for i in chosen], dim=1)
        features.update((i, piece.clone()) for i, piece in zip(chosen, pieces, strict=True))
    return [features[i] for i in range(len(pool))]


@contextmanager
def watching_routers(model: nn.Module, seen: list[tuple[Tensor, ...]]) -> Iterator[None]:
    """Append (input, logits, weights, ids) of every router call to `seen`."""
    gates = [layer.mlp.gate for layer in model.model.language_model.layers]  # type: ignore[union-attr]
    hooks = [gate.register_forward_hook(lambda _m, args, out: seen.append((args[0], *out))) for gate in gates]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def decode(model: Qwen3VLMoeForConditionalGeneration, batch: DialogueBatch, visual: Tensor) -> Tensor:
    """Last hidden states (B, T, H); `visual` (1 + deepstack, N, H) holds the batch's visual tokens in order."""
    text = model.model.language_model
    embeds = text.embed_tokens(batch.input_ids)
    embeds = embeds.masked_scatter(batch.visual.unsqueeze(-1), visual[0].to(embeds.dtype))
    output = text(
        inputs_embeds=embeds,
        attention_mask=batch.mask(),
        position_ids=batch.position_ids,
        visual_pos_masks=batch.visual,
        deepstack_visual_embeds=list(visual[1:].to(embeds.dtype)),
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def answer_logits(model: Qwen3VLMoeForConditionalGeneration, batch: DialogueBatch, hidden: Tensor) -> Tensor:
    """(A, V) logits at the A positions that have a label."""
    words: Tensor = model.model.language_model.embed_tokens.weight
    return hidden[batch.labels != IGNORED] @ words.t()


class WholeStage(L.LightningModule):
    """Next-token loss on the answers, and balance of every layer's routers for visual and text tokens apart."""

    def __init__(
        self,
        model: Qwen3VLMoeForConditionalGeneration,
        *,
        steps: int,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        balance: BalanceWeights | None = None,
    ) -> None:
        super().__init__()
        self.model, self.steps, self.learning_rate, self.weight_decay = model, steps, learning_rate, weight_decay
        self.balance = balance or BalanceWeights()
        model.model.visual.requires_grad_(False)

    def training_step(self, batch: tuple[DialogueBatch, Tensor], index: int) -> Tensor:
        """One batch of (dialogues, visual features)."""
        dialogues, visual = batch
        routed: list[tuple[Tensor, ...]] = []
        with watching_routers(self.model, routed):
            hidden = decode(self.model, dialogues, visual)
        logits, labels = answer_logits(self.model, dialogues, hidden), dialogues.labels[dialogues.labels != IGNORED]
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("whole/loss", loss, prog_bar=True)
        self.log("whole/token_accuracy", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)
        for name, weight, mask in (
            ("visual", self.balance.visual, dialogues.visual),
            ("text", self.balance.text, (dialogues.branch >= 0) & ~dialogues.visual),
        ):
            imbalance = self._imbalance(routed, mask.reshape(-1))
            self.log(f"whole/imbalance_{name}", imbalance)
            loss = loss + weight * imbalance
        return loss

    def _imbalance(self, routed: Sequence[tuple[Tensor, ...]], rows: Tensor) -> Tensor:
        """Switch balance loss of the given rows, mean over layers; 1 is even, transformers' own pools all layers."""
        config: Any = self.model.config.text_config
        top_k = config.num_experts_per_tok
        losses = [torch.as_tensor(load_balancing_loss_func((r[1][rows],), config.num_experts, top_k)) for r in routed]
        imbalance: Tensor = torch.stack(losses).mean() / top_k
        return imbalance

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW on all but the vision tower."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.98), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_at)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate_at(self, step: int) -> float:
        """Warm-up, a plateau, and a straight fall over the last quarter: a resumed run may be given more steps."""
        return min(1.0, (step + 1) / 200, max(0.02, (self.steps - step) / (0.25 * self.steps)))
