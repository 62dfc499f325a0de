"""`make reference`: both stages, resumable and seeded, then export, measurement and model card."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedTokenizerBase, Qwen3VLMoeForConditionalGeneration

from vismmoe_training.reference.card import write_card
from vismmoe_training.reference.dialogue import DialogueBatch, DialogueEncoder, token_grid
from vismmoe_training.reference.experts import use_grouped_experts
from vismmoe_training.reference.measure import Measurement, hold_out, measure
from vismmoe_training.reference.pool import PooledScene, batches_of_like_size, build_pool, pixel_values, scene_seeds
from vismmoe_training.reference.revive import revive
from vismmoe_training.reference.routing import BANDS
from vismmoe_training.reference.shape import ReferenceShape, build_config, build_model, build_processor, save_reference
from vismmoe_training.reference.sheets import Strip, find_strips, sheet_batch
from vismmoe_training.reference.tokenizer import build_tokenizer
from vismmoe_training.reference.vision import TokenNamer, VisionStage
from vismmoe_training.reference.whole import RoutingWeights, WholeStage, encode_pool, soften_deepstack
from vismmoe_training.scenes import Scene, SceneSpec, ask, scene_from_seed

# Most training pictures are the smallest there are: the same lessons at a fraction of the price.
SMALLEST, SMALL, FULL = SceneSpec(max_side_px=128), SceneSpec(max_side_px=160), SceneSpec()
CROWDED = SceneSpec(min_objects=3, max_objects=6, max_side_px=128, text_probability=0.7)
VISION_MIX = (*[CROWDED] * 6, SMALLEST, SMALL)
WHOLE_MIX = (*[SMALLEST] * 5, SMALL, SMALL, FULL)
QUESTIONS = {"existence": 1, "count": 2, "position": 1, "colour": 1, "reading": 1, "choice": 3}  # a picture


@dataclass(frozen=True)
class RecipeConfig:
    """What the training of the reference model takes."""

    work: Path = Path("build/reference")  # checkpoints of the stages
    output: Path = Path("checkpoints/reference")
    seed: int = 0
    vision_scenes: int = 16000
    vision_steps: int = 1200
    vision_batch: int = 32
    whole_scenes: int = 12000
    whole_steps: int = 3000
    whole_batch: int = 16
    easy_steps: int = 200  # at first only pictures of at most two objects
    learning_rate: float = 2e-3
    warm_up_steps: int = 200  # of the second stage
    routing: RoutingWeights = field(default_factory=RoutingWeights)
    threads: int = 2
    start_from: Path | None = None  # a finished model whose decoder trains on; its vision tower stays as it is
    watch_scenes: int = 96  # held-out scenes measured after each epoch of the second stage; 0: none
    stop_after_epochs: int | None = None  # end each stage early, to be resumed
    epoch_steps: int = 100  # short epochs: a resumed run starts at the boundary of one


VisionBatch = tuple[Tensor, Tensor, Tensor, Tensor | None]


class VisionBatches(IterableDataset[VisionBatch]):
    """One epoch of (pixels, grids, labels, outlines), scenes and sheets of writing in turn."""

    def __init__(self, pool: list[PooledScene], strips: list[Strip], *, batch: int, seed: int, steps: int) -> None:
        self.pool, self.strips = pool, strips
        self.batch, self.seed, self.steps = batch, seed, steps

    def __iter__(self) -> Iterator[VisionBatch]:
        rng = np.random.default_rng(self.seed)
        batches = batches_of_like_size(np.array([scene.tokens for scene in self.pool]), self.batch, rng)
        for step in range(self.steps):
            yield (
                self._scenes(next(batches))
                if step % 2
                else (*sheet_batch(self.pool, self.strips, self.batch, rng), None)
            )

    def _scenes(self, indices: npt.NDArray[np.int64]) -> VisionBatch:
        scenes = [self.pool[int(i)] for i in indices]
        labels = torch.from_numpy(np.concatenate([s.labels for s in scenes], axis=1))
        return (*pixel_values(scenes), labels, torch.from_numpy(np.concatenate([s.outlines for s in scenes])))


class DialogueBatches(IterableDataset[tuple[DialogueBatch, Tensor]]):
    """One epoch of (dialogues, visual features), with questions drawn anew."""

    def __init__(
        self,
        scenes: Sequence[Scene],
        features: Sequence[Tensor],
        encoder: DialogueEncoder,
        *,
        batch: int,
        seed: int,
        steps: int,
    ) -> None:
        self.scenes, self.features, self.encoder = scenes, features, encoder
        self.batch, self.seed, self.steps = batch, seed, steps

    def __iter__(self) -> Iterator[tuple[DialogueBatch, Tensor]]:
        rng = np.random.default_rng(self.seed)
        sizes = np.array([feature.shape[1] for feature in self.features])
        for indices in itertools.islice(batches_of_like_size(sizes, self.batch, rng), self.steps):
            yield dialogue_batch(indices.tolist(), self.scenes, self.features, self.encoder, rng)


def dialogue_batch(
    indices: Sequence[int],
    scenes: Sequence[Scene],
    features: Sequence[Tensor],
    encoder: DialogueEncoder,
    rng: np.random.Generator,
) -> tuple[DialogueBatch, Tensor]:
    """Some questions of each style about the scenes of these indices."""
    own = [scenes[i] for i in indices]
    questions = [[q for style, n in QUESTIONS.items() for q in ask(s, rng, (style,), n)] for s in own]
    grids = [token_grid(scene) for scene in own]
    branches = [[encoder.branch(question) for question in asked] for asked in questions]
    return encoder.batch(grids, branches), torch.cat([features[i] for i in indices], dim=1).float()


class EpochData(L.LightningDataModule):
    """A fresh, seeded data set for each epoch, so that a resumed run sees what an unbroken one would have seen."""

    def __init__(self, make: Callable[[int], IterableDataset[Any]], epoch_steps: int) -> None:
        super().__init__()
        self.make, self.epoch_steps = make, epoch_steps

    def train_dataloader(self) -> DataLoader[Any]:
        """The data of the epoch that begins; a resumed trainer still names the finished one, so the steps tell."""
        epoch = self.trainer.global_step // self.epoch_steps if self.trainer else 0
        return DataLoader(self.make(epoch), batch_size=None)


class Watch(Callback):
    """Measures held-out scenes after each epoch, and says so in one line: what answers, what lies outside its band."""

    def __init__(
        self, model: Qwen3VLMoeForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, scenes: int
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.held = hold_out(model, scenes, seed=777_000)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Measure, and go on."""
        measured = measure(self.model, self.tokenizer, self.held)
        print(f"step {trainer.global_step}: {summary(measured)}", file=sys.stderr, flush=True)


def summary(measured: Measurement) -> str:
    """Exact match, and for each banded figure its range over the layers and which of them lie outside."""
    told = [f"exact match {measured.overall:.3f}"]
    for name, (low, high) in BANDS.items():
        values = getattr(measured.routing, name)
        outside = [str(layer) for layer, value in enumerate(values) if not low <= value <= high]
        told.append(f"{name} {min(values):.3f}..{max(values):.3f}" + (f" (layers {' '.join(outside)})" * bool(outside)))
    return ", ".join(told)


def fit(
    stage: L.LightningModule,
    data: EpochData,
    folder: Path,
    steps: int,
    epochs: int | None = None,
    watch: Sequence[Callback] = (),
) -> None:
    """Train a stage to `steps`, going on from the folder's last checkpoint where there is one."""
    keep = ModelCheckpoint(folder, save_last=True, every_n_epochs=1, save_top_k=1, save_on_train_epoch_end=True)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=epochs or -1,
        logger=CSVLogger(folder, name="log", flush_logs_every_n_steps=20),
        callbacks=[keep, *watch],
        log_every_n_steps=20,
        gradient_clip_val=1.0,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
        reload_dataloaders_every_n_epochs=1,
    )
    last = folder / "last.ckpt"
    trainer.fit(stage, data, ckpt_path=last if last.exists() else None)


class Recipe:
    """The stages in order; each leaves its checkpoint in `config.work` and is skipped once it has reached its steps."""

    def __init__(self, config: RecipeConfig, shape: ReferenceShape | None = None) -> None:
        self.config, self.shape = config, shape or ReferenceShape()
        self.tokenizer: PreTrainedTokenizerBase = build_tokenizer()
        self.model: Qwen3VLMoeForConditionalGeneration = build_model(
            build_config(self.shape, self.tokenizer), config.seed
        )

    def train_vision(self) -> None:
        """Stage one, or another model's finished one."""
        config = self.config
        if config.start_from:
            finished = Qwen3VLMoeForConditionalGeneration.from_pretrained(config.start_from, dtype=torch.float32)
            self.model.load_state_dict(finished.state_dict())
            return
        stage = VisionStage(self.model, TokenNamer(self.shape.hidden_size, self.tokenizer), steps=config.vision_steps)
        if not self._is_done("vision", config.vision_steps, stage):
            pool = build_pool(config.vision_scenes, config.seed, VISION_MIX)
            strips = find_strips(pool)
            size, steps = config.vision_batch, config.epoch_steps

            def epoch_data(epoch: int) -> VisionBatches:
                return VisionBatches(pool, strips, batch=size, seed=self._epoch_seed(1, epoch), steps=steps)

            data = EpochData(epoch_data, config.epoch_steps)
            fit(stage, data, config.work / "vision", config.vision_steps, config.stop_after_epochs)

    def train_whole(self) -> None:
        """Stage two."""
        config = self.config
        if not config.start_from:
            soften_deepstack(self.model)
        use_grouped_experts(self.model)
        stage = WholeStage(
            self.model,
            steps=config.whole_steps,
            learning_rate=config.learning_rate,
            warm_up_steps=config.warm_up_steps,
            routing=config.routing,
        )
        if self._is_done("whole", config.whole_steps, stage):
            return
        scenes, features = self._features()
        easy = [index for index, scene in enumerate(scenes) if len(scene.objects) <= 2]
        encoder = DialogueEncoder(self.tokenizer)

        def epoch_data(epoch: int) -> DialogueBatches:
            chosen = easy if (epoch + 1) * config.epoch_steps <= config.easy_steps else range(len(scenes))
            part = [scenes[i] for i in chosen], [features[i] for i in chosen]
            seed, steps = self._epoch_seed(2, epoch), config.epoch_steps
            return DialogueBatches(*part, encoder, batch=config.whole_batch, seed=seed, steps=steps)

        fit(
            stage,
            EpochData(epoch_data, config.epoch_steps),
            config.work / "whole",
            config.whole_steps,
            config.stop_after_epochs,
            [Watch(self.model, self.tokenizer, config.watch_scenes)] if config.watch_scenes else [],
        )

    def revive_experts(self, scenes: int = 96) -> int:
        """Draw experts that the last step left out back into use, on scenes of their own; how many rows were moved."""
        held = hold_out(self.model, scenes, seed=self._epoch_seed(3, 0))
        encoder, rng = DialogueEncoder(self.tokenizer), np.random.default_rng(self._epoch_seed(3, 1))
        order = sorted(range(scenes), key=lambda index: held.features[index].shape[1])
        chunks = [order[start : start + self.config.whole_batch] for start in range(0, scenes, self.config.whole_batch)]
        return revive(self.model, [dialogue_batch(chunk, held.scenes, held.features, encoder, rng) for chunk in chunks])

    def export(self, folder: Path, scenes: int = 512) -> Measurement:
        """Save the model as people load it, measure those very weights, and write its card."""
        save_reference(self.model, build_processor(self.shape, self.tokenizer), folder)
        saved = Qwen3VLMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        use_grouped_experts(saved)
        measured = measure(saved.eval(), self.tokenizer, hold_out(saved, scenes))
        config = self.config
        write_card(
            folder,
            measured,
            self.shape,
            seed=config.seed,
            vision_steps=config.vision_steps,
            whole_steps=self._steps_of("whole"),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
        )
        return measured

    def _steps_of(self, name: str) -> int:
        last = self.config.work / name / "last.ckpt"
        return int(torch.load(last, weights_only=True, map_location="cpu")["global_step"])

    def _features(self) -> tuple[list[Scene], list[Tensor]]:
        """The second stage's scenes and what the finished tower says of them, kept on disk between runs."""
        path, config = self.config.work / "features.safetensors", self.config
        seeds = scene_seeds(config.whole_scenes, config.seed + 1, WHOLE_MIX)
        scenes = [scene_from_seed(seed, spec) for seed, spec in seeds]
        if not path.exists():
            pool = build_pool(config.whole_scenes, config.seed + 1, WHOLE_MIX)
            path.parent.mkdir(parents=True, exist_ok=True)  # no first stage made it where another model is trained on
            save_file({"features": torch.cat(encode_pool(self.model, pool), dim=1)}, path)
        counts = [height * width for height, width in map(token_grid, scenes)]
        features = torch.split(load_file(path)["features"], counts, dim=1)
        return scenes, list(features)

    def _epoch_seed(self, stage: int, epoch: int) -> int:
        return (self.config.seed * 10 + stage) * 100_003 + epoch

    def _is_done(self, name: str, steps: int, stage: L.LightningModule) -> bool:
        """Whether a stage has reached its steps; its weights are in place then."""
        last = self.config.work / name / "last.ckpt"
        if not last.exists():
            return False
        state = torch.load(last, weights_only=True, map_location="cpu")
        if state["global_step"] < steps:
            return False
        stage.load_state_dict(state["state_dict"])
        return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = RecipeConfig()
    for name, kind in (
        ("seed", int),
        ("vision_steps", int),
        ("whole_steps", int),
        ("threads", int),
        ("whole_scenes", int),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(defaults, name))
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    for name in ("work", "output", "start_from"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, default=getattr(defaults, name))
    config = replace(defaults, **vars(parser.parse_args(arguments)))
    torch.set_num_threads(config.threads)
    recipe = Recipe(config)
    recipe.train_vision()
    recipe.train_whole()
    print(f"experts drawn back into use: {recipe.revive_experts()}", file=sys.stderr)
    measured = recipe.export(config.output)
    print(f"exact match {measured.overall:.3f}: {measured.by_style}")
    print("\n".join(measured.routing.failures()) or "routing: all layers within the bands")
