"""The training loop's view of the network in vismmoe.predictors: loss, optimiser, recall."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor

from vismmoe.predictors.lookahead import LookaheadNet, lookahead_loss
from vismmoe.predictors.options import PredictorConfig
from vismmoe.types import PHASES, ModelSpec
from vismmoe_training.recall import HotRecall
from vismmoe_training.row_table import Batch

TOP = (10, 20, 30)  # the published k
MONITOR = "val/recall20"  # mean of prefill and decode, each blended over distances
FITTED = ("guide.down", "guide.up")  # set by the warm start from a dense target: the loss below only trims them
FITTED_RATE = 0.01  # of the learning rate


class LookaheadTrainer(LightningModule):
    """Soft BCE with distance decay (VisMMoE §2); Hot Recall@10, 20, 30 by distance on held-out images."""

    def __init__(
        self, config: PredictorConfig, spec: ModelSpec, learning_rate: float, weight_decay: float, seed: int
    ) -> None:
        super().__init__()
        self.save_hyperparameters(  # plain types: checkpoints are read without unpickling objects
            {
                "config": config.to_json(),
                "spec": {**asdict(spec), "moe_layers": list(spec.moe_layers)},
                "learning_rate": learning_rate,
                "weight_decay": weight_decay,
                "seed": seed,
            },
            logger=False,
        )
        self.net = LookaheadNet(config, spec)
        self._gamma, self._rate, self._decay, self._seed = config.gamma, learning_rate, weight_decay, seed
        recalls = {f"recall{k}_{phase}": HotRecall(k, config.window) for k in TOP for phase in PHASES}
        self._recalls = torch.nn.ModuleDict(recalls)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        # a resumed training drops the same units; Lightning calls no epoch hook in the first epoch after a resume
        torch.manual_seed(self._seed * 1_000_003 + self.global_step)
        loss = lookahead_loss(self.net(batch.inputs), batch.active, batch.exists, self._gamma)
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch.active))
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        logits = self.net(batch.inputs)
        loss = lookahead_loss(logits, batch.active, batch.exists, self._gamma)
        self.log("val/loss", loss, batch_size=len(batch.active))
        decode = batch.inputs.decode
        for name, recall in self._recalls.items():
            assert isinstance(recall, HotRecall)
            rows = decode if name.endswith("decode") else ~decode
            recall.update(logits[rows], batch.active[rows])

    def on_validation_epoch_end(self) -> None:
        told: dict[str, float] = {}
        for name, recall in self._recalls.items():
            assert isinstance(recall, HotRecall)
            told[f"val/{name}"] = recall.blended()
            told |= {f"val/{name}_d{d + 1}": value for d, value in enumerate(recall.compute().tolist())}
            recall.reset()
        for k in TOP:  # a prefill activates ten times the experts of a decoded token: each phase weighs the same
            phases = [told[f"val/recall{k}_{phase}"] for phase in PHASES]
            told[f"val/recall{k}"] = float(torch.tensor(phases).nanmean())
        self.log_dict({name: torch.tensor(value) for name, value in told.items() if value == value})

    def configure_optimizers(self) -> Any:
        fitted = [p for name, p in self.net.named_parameters() if name in FITTED]
        others = [p for name, p in self.net.named_parameters() if name not in FITTED]
        rates = [self._rate, self._rate * FITTED_RATE]
        groups = [{"params": p, "lr": rate} for p, rate in zip((others, fitted), rates, strict=True) if p]
        optimiser = torch.optim.AdamW(groups, weight_decay=self._decay)
        steps = max(int(self.trainer.estimated_stepping_batches), self.trainer.max_epochs or 1)
        peaks = rates[: len(groups)]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, peaks, total_steps=steps + 1, pct_start=0.1)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
