"""How much is done, and where things lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vismmoe.compressors import COMPRESSORS
from vismmoe_training.scenes.mixes import MIXES

ANSWER_TOKENS = 12
DTYPE: Literal["float32"] = "float32"  # the same figures on machines with and without native bfloat16
KEEP_RATIOS = (0.7, 0.5, 0.3)
HALF = 0.5
CURVE = ("affinity-bytes", "affinity-prompt", "affinity", "saliency", "random")  # asked at every keep ratio
# With every expert resident, as here, affinity-resident finds nothing to save: it is saliency.
ARMS = tuple((m, r) for r in KEEP_RATIOS for m in COMPRESSORS if m in CURVE or (r == HALF and m != "affinity-resident"))
MAIN = tuple((m, HALF) for m in CURVE)  # asked everything; the others are asked the first ones on each kind of scene
LOGGED_RATIO = 0.5  # of the visual tokens, in all routing logs: what the published speed runs keep


@dataclass(frozen=True)
class Scale:
    """Counts of each part."""

    seeds: int
    train_images: int  # of the shipped training scenes, whose routing is logged once
    heldout_images: int  # of each kind of scene, newly drawn for each seed
    logged_images: int  # of these: whose routing is logged, to test the predictors on
    questions: int  # on each kind of scene and each seed, asked of the compressors in MAIN
    fewer_questions: int  # of these, asked of all others
    ablation_questions: int
    epochs: int
    simulator_questions: int = 4


FULL = Scale(
    seeds=3,
    train_images=160,
    heldout_images=24,
    logged_images=12,
    questions=48,
    fewer_questions=16,
    ablation_questions=8,
    epochs=15,
)
REDUCED = Scale(
    seeds=2,
    train_images=16,
    heldout_images=3,
    logged_images=2,
    questions=2,
    fewer_questions=1,
    ablation_questions=2,
    epochs=2,
)

SPECS = MIXES
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
