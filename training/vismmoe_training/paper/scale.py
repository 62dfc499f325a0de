"""How much is done, and where things lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vismmoe.compressors import COMPRESSORS
from vismmoe_training.scenes import SceneSpec

ANSWER_TOKENS = 12
DTYPE: Literal["float32"] = "float32"  # the same figures on machines with and without native bfloat16
KEEP_RATIOS = (0.7, 0.5, 0.3)
AT_FEWEST = ("affinity", "affinity-bytes", "prompt", "saliency", "random", "downsample")
ARMS = tuple((m, r) for r in KEEP_RATIOS for m in COMPRESSORS if r > min(KEEP_RATIOS) or m in AT_FEWEST)
LOGGED_RATIO = 0.5  # of the visual tokens, in all routing logs: what the published speed runs keep


@dataclass(frozen=True)
class Scale:
    """Counts of each part."""

    seeds: int
    train_images: int  # of the shipped training scenes, whose routing is logged once
    heldout_images: int  # newly drawn for each seed, half of each kind of scene
    questions: int  # asked of every compressor at every keep ratio, each seed
    ablation_questions: int
    epochs: int
    simulator_questions: int = 4


FULL = Scale(seeds=3, train_images=160, heldout_images=32, questions=24, ablation_questions=8, epochs=15)
REDUCED = Scale(seeds=2, train_images=16, heldout_images=6, questions=2, ablation_questions=2, epochs=2)

# Scenes as the model was trained on, and scenes of more and smaller things, where a dropped token costs most.
SPECS = {
    "usual": SceneSpec(),
    "crowded": SceneSpec(min_objects=3, max_objects=7, min_side_px=192, max_side_px=256, max_object_px=44),
}
FIRST_SEED = 90_001  # of the held-out scenes; the shipped ones and the reference model's own have others


@dataclass(frozen=True)
class Paper:
    """One run."""

    model: str
    train_corpus: Path
    output: Path
    scale: Scale
    workers: int

    def scenes(self, seed: int, kind: str) -> Path:
        return self.output / f"scenes-{kind}-{seed}"

    def logs(self, name: str) -> Path:
        return self.output / f"logs-{name}"
