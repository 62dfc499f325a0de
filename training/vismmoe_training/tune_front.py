"""The Pareto front of a study as configs, and the one that is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from vismmoe.config import TuneConfig
from vismmoe.trace import write_atomically

GOOD_ENOUGH = 0.95
RULE = f"the least stall of those with at least {GOOD_ENOUGH:.0%} of the front's best accuracy"


def front(study: optuna.Study) -> list[FrozenTrial]:
    """Trials that no other one beats in both stall and accuracy, least stall first; of equal ones the first."""
    points: dict[tuple[float, ...], FrozenTrial] = {}
    for trial in sorted(study.best_trials, key=lambda trial: (trial.values[0], -trial.values[1], trial.number)):
        points.setdefault(tuple(trial.values), trial)
    return list(points.values())


def recommended(points: Sequence[FrozenTrial]) -> FrozenTrial:
    """By RULE."""
    best = max(trial.values[1] for trial in points)
    return min((t for t in points if t.values[1] >= GOOD_ENOUGH * best), key=lambda trial: trial.values[0])


def write_front(points: Sequence[FrozenTrial], config: TuneConfig, output: Path) -> list[Path]:
    """`output` gets the recommended point, `output`-N.yaml beside it every point; returns all files."""
    output.parent.mkdir(parents=True, exist_ok=True)
    chosen = recommended(points)
    files = []
    for number, point in enumerate(points, start=1):
        files.append(output.with_name(f"{output.stem}-{number}{output.suffix}"))
        write_atomically(files[-1], _text(point, config, f"Point {number} of {len(points)} on the front").encode())
    title = f"Recommended: {RULE}, of {len(points)} points on the front"
    write_atomically(output, _text(chosen, config, title).encode())
    return [output, *files]


def settings_of(trial: FrozenTrial) -> dict[str, Any]:
    """Parameters as config values."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in trial.params.items()}


def _text(trial: FrozenTrial, config: TuneConfig, title: str) -> str:
    stall_ms, accuracy = trial.values
    split = {"val_fraction": config.val_fraction, "test_fraction": config.test_fraction, "seed": config.seed}
    values = {"commands": "[collect, train, infer]", **settings_of(trial), **split}
    return "\n".join(
        (
            f"# {title}: simulated stall {stall_ms:.3f} ms a request, accuracy {accuracy:.3f} "
            f"(study {config.study}, trial {trial.number}).",
            "# The split is part of it: with another one the test images would be images that trials were compared on.",
            *(f"{name}: {value}" for name, value in values.items()),
            "",
        )
    )
