"""Stage two: the decoder learns to answer about pictures that the frozen vision tower describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from transformers import Qwen3VLMoeForConditionalGeneration

from vismmoe_training.reference.bands import RunningBands
from vismmoe_training.reference.dialogue import IGNORED, DialogueBatch
from vismmoe_training.reference.pool import PooledScene, pixel_values
from vismmoe_training.reference.terms import imbalance, imbalance_within, indecision, neglect, surprise


@dataclass(frozen=True)
class RoutingWeights:
    """Weights of the terms that make a small model route like a large one.

    Each pulls on a layer only while the layer lies outside the band of the figure named with it (`bands.py`).
    """

    balance: float = 0.1  # least_share: even use over a batch (Switch form)
    neglect: float = 3.0  # least_share: revives dead experts
    picture: float = 0.3  # coverage_visual: spread within each picture when above the band, the opposite when below
    text: float = 0.2  # coverage_text: the same for the text of a request
    foresight: float = 2.0  # next_gate: the router should find most of its choice in the last layer's state already
    constancy: float = 2.0  # next_gate: and what comes between should not change the choice
    decided: float = 0.1  # next_gate: clear-cut choices


# Routers learn at this part of the rate. At the whole rate experts fall in and out of use from step to step: each looks
# used on average, and is dead in whatever state the training ends.
ROUTER_RATE = 0.15
FALL = 0.25  # part of the steps over which the rate falls to nothing


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


def early_logits(model: Qwen3VLMoeForConditionalGeneration, inputs: Sequence[Tensor]) -> list[Tensor]:
    """(rows, E) each: what the routers of layers 1 on would say of the state that the router before them saw.

    `inputs`: each router's own input (..., H), which its layer's norm has scaled.
    """
    layers = model.model.language_model.layers
    norms = [layer.post_attention_layernorm.weight for layer in layers]
    flat = [value.reshape(-1, value.shape[-1]) for value in inputs]
    return [(flat[i] / norms[i] * norms[i + 1]) @ layers[i + 1].mlp.gate.weight.t() for i in range(len(layers) - 1)]


class WholeStage(L.LightningModule):
    """Next-token loss on the answers, and the terms of `RoutingWeights`, mean over layers."""

    def __init__(
        self,
        model: Qwen3VLMoeForConditionalGeneration,
        *,
        steps: int,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        warm_up_steps: int = 200,
        routing: RoutingWeights | None = None,
    ) -> None:
        super().__init__()
        self.model, self.steps, self.learning_rate, self.weight_decay = model, steps, learning_rate, weight_decay
        self.warm_up_steps = warm_up_steps
        self.routing = routing or RoutingWeights()
        text: Any = model.config.text_config
        self.bands = RunningBands(int(text.num_hidden_layers), int(text.num_experts))
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
        """Each term, mean over the layers on which it pulls now; notes the batch's figures on the way."""
        layers, top_k = len(routed), int(self.model.config.text_config.num_experts_per_tok)
        written, seen = (dialogues.branch >= 0) & ~dialogues.visual, dialogues.visual
        early = early_logits(self.model, [inputs for inputs, *_ in routed])
        self._note_figures(routed, early, dialogues)
        looked, read = seen.reshape(-1), written.reshape(-1)
        pulls = self.bands.pulls()

        def mean(figure: str, term: Callable[[int], Tensor]) -> Tensor:
            pull = pulls[figure]
            pulled = [pull[i] * term(i) for i in range(layers) if float(pull[i])]
            return torch.stack(pulled).sum() / layers if pulled else pull.new_zeros(())

        def both(figure: str, term: Callable[[int, Tensor], Tensor]) -> Tensor:
            """Visual tokens are most of a request, though written ones are most of a training batch."""
            return mean(figure, lambda i: 0.7 * term(i, looked) + 0.3 * term(i, read))

        logits, ids = [out for _, out, _, _ in routed], [chosen for *_, chosen in routed]
        return {
            "balance": mean("least_share", lambda i: imbalance(logits[i][looked], top_k)),
            "neglect": mean("least_share", lambda i: neglect(logits[i][looked], top_k)),
            "picture": -mean("coverage_visual", lambda i: imbalance_within(logits[i], ids[i], seen)),
            "text": -mean("coverage_text", lambda i: imbalance_within(logits[i], ids[i], written)),
            "foresight": both("next_gate", lambda i, rows: surprise(early[i - 1][rows], logits[i][rows], top_k)),
            "constancy": both("next_gate", lambda i, rows: surprise(logits[i][rows], early[i - 1][rows], top_k)),
            "decided": both("next_gate", lambda i, rows: indecision(logits[i][rows], top_k)),
        }

    @torch.no_grad()
    def _note_figures(
        self, routed: Sequence[tuple[Tensor, ...]], early: Sequence[Tensor], dialogues: DialogueBatch
    ) -> None:
        shape, top_k = dialogues.branch.shape, routed[0][3].shape[-1]
        chosen = torch.stack([ids for *_, ids in routed]).view(len(routed), *shape, top_k)
        guessed = torch.stack([logits.topk(top_k, dim=-1).indices for logits in early])
        request = (dialogues.branch == 0) | (dialogues.branch == 1)
        visual, text = request & dialogues.visual, request & ~dialogues.visual
        self.bands.note(chosen, guessed.view(len(early), *shape, top_k), visual, text)

    def on_train_start(self) -> None:
        """A resumed run may be given another learning rate: the checkpoint's schedule still holds the old one."""
        scheduler: Any = self.lr_schedulers()
        scheduler.base_lrs = [self.learning_rate, self.learning_rate, ROUTER_RATE * self.learning_rate]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW on all but the vision tower; routers learn slowly."""
        gates = [p for name, p in self.model.named_parameters() if name.endswith("mlp.gate.weight")]
        routing = {id(p) for p in gates}
        trained = [p for p in self.model.parameters() if p.requires_grad and id(p) not in routing]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
            {"params": gates, "weight_decay": 0.0, "lr": ROUTER_RATE * self.learning_rate},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.98), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate_at)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate_at(self, step: int) -> float:
        """Warm-up, a plateau, and a straight fall over the last part: a resumed run may be given more steps."""
        return min(1.0, (step + 1) / self.warm_up_steps, max(0.02, (self.steps - step) / (FALL * self.steps)))
