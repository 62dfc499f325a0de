"""Stage two: the decoder learns to answer about pictures that the frozen vision tower describes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
class RoutingWeights:
    """Weights of the terms that make a small model route like a large one; each term is 0 where it has its way."""

    visual: float = 0.1  # balance of the visual tokens of a batch (Switch form, per layer)
    picture: float = 0.03  # balance of the visual tokens within each picture: a real one spreads over most experts
    text: float = 0.05  # the other way round: the text of a request comes back to the same experts
    foresight: float = 2.0  # the next layer's router should find most of its choice in this layer's state already


TEXT_CONCENTRATION = 0.4  # imbalance of the text of a request from which on nothing more is asked


@torch.no_grad()
def soften_deepstack(model: Qwen3VLMoeForConditionalGeneration, factor: float = 0.3) -> None:
    """Scale what DeepStack adds after the first layers, once the tower is trained.

    Its features are as long as the embeddings themselves; added whole they turn the state of a visual token, and no
    router could be foreseen across them.
    """
    for merger in model.model.visual.deepstack_merger_list:
        merger.linear_fc2.weight.mul_(factor)
        merger.linear_fc2.bias.mul_(factor)


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


def imbalance(logits: Tensor, top_k: int) -> Tensor:
    """Switch balance loss of one layer's router logits (rows, E): 0 is even. transformers' own pools all layers."""
    value = torch.as_tensor(load_balancing_loss_func((logits,), logits.shape[-1], top_k))
    return value / top_k - 1


def imbalance_within(logits: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The same within each sequence, mean over the B sequences (DeepSeek-V3's sequence-wise balance loss).

    logits (B * T, E), chosen ids (B * T, k), mask (B, T) of the tokens that count.
    """
    rows, length = mask.shape
    weight = mask.float() / mask.sum(1, keepdim=True).clamp(min=1)
    experts, top_k = logits.shape[-1], ids.shape[-1]
    share = torch.einsum("bte,bt->be", logits.softmax(-1).view(rows, length, -1), weight)
    place = ids + torch.arange(rows, device=ids.device).repeat_interleave(length).unsqueeze(1) * experts
    each = (weight / top_k).reshape(-1, 1).expand(-1, top_k)
    load = torch.bincount(place.reshape(-1), each.reshape(-1), minlength=rows * experts).view(rows, experts)
    return (share * load).sum(-1).mean() * experts - 1


def surprise(early: Tensor, late: Tensor, mask: Tensor) -> Tensor:
    """How far a router's logits (rows, E) lie from what it would have said one layer earlier: 1 - their correlation."""
    before, after = (logits.view(late.shape)[mask] for logits in (early, late.detach()))
    before, after = (logits - logits.mean(-1, keepdim=True) for logits in (before, after))
    return 1 - nn.functional.cosine_similarity(before, after, dim=-1).mean()


def _mean(values: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()


class WholeStage(L.LightningModule):
    """Next-token loss on the answers, and the terms of `RoutingWeights`, mean over layers."""

    def __init__(
        self,
        model: Qwen3VLMoeForConditionalGeneration,
        *,
        steps: int,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        routing: RoutingWeights | None = None,
    ) -> None:
        super().__init__()
        self.model, self.steps, self.learning_rate, self.weight_decay = model, steps, learning_rate, weight_decay
        self.routing = routing or RoutingWeights()
        model.model.visual.requires_grad_(False)

    def transfer_batch_to_device(
        self, batch: tuple[DialogueBatch, Tensor], device: torch.device, dataloader_idx: int
    ) -> tuple[DialogueBatch, Tensor]:
        """Lightning moves dicts and lists by itself, frozen dataclasses it refuses."""
        return batch[0].to(device), batch[1].to(device)

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
        terms = self._routing_terms(routed, dialogues)
        self.log_dict({f"whole/{name}": value for name, value in terms.items()})
        return loss + torch.stack([vars(self.routing)[name] * value for name, value in terms.items()]).sum()

    def _routing_terms(self, routed: Sequence[tuple[Tensor, ...]], dialogues: DialogueBatch) -> dict[str, Tensor]:
        config: Any = self.model.config.text_config
        written = ((dialogues.branch >= 0) & ~dialogues.visual).reshape(-1)
        seen, top_k = dialogues.visual.reshape(-1), int(config.num_experts_per_tok)
        norms = [layer.post_attention_layernorm.weight for layer in self.model.model.language_model.layers]
        gates = [layer.mlp.gate.weight for layer in self.model.model.language_model.layers]
        return {
            "visual": _mean(imbalance(logits[seen], top_k) for _, logits, _, _ in routed),
            "text": _mean(
                (TEXT_CONCENTRATION - imbalance_within(logits, ids, written.view(dialogues.visual.shape))).relu()
                for _, logits, _, ids in routed
            ),
            "picture": _mean(imbalance_within(logits, ids, dialogues.visual) for _, logits, _, ids in routed),
            "foresight": _mean(
                surprise(routed[i][0] / norms[i] * norms[i + 1] @ gates[i + 1].t(), routed[i + 1][1], seen | written)
                for i in range(len(routed) - 1)
            ),
        }

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
