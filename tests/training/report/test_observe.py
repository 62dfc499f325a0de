"""What a report counts of the model's choices, on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from vismmoe.config import EngineConfig
from vismmoe.engine import Engine
from vismmoe.simulate.result import Span
from vismmoe.simulate.transfers import Read
from vismmoe.types import ExpertId
from vismmoe_training.report import figures
from vismmoe_training.report.observe import Observation, observe


def test_every_choice_is_counted_once_and_the_core_is_kept(
    tiny_checkpoint: Path, make_picture: Callable[..., Image.Image], tmp_path: Path
) -> None:
    make_picture(64, 48).save(tmp_path / "one.png")
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), device="cpu")) as engine:
        seen = observe(engine, [(tmp_path / "one.png", "What?")], keep_ratio=0.5, compressor="affinity")
    visual, kept = seen.counts["visual, all"][0].sum(-1), seen.counts["visual, kept"][0].sum(-1)
    assert visual.tolist() == [12 * 4] * 6
    assert kept.tolist() == [12 * 4] * seen.prefix_layers + [6 * 4] * (6 - seen.prefix_layers)
    assert len(set(seen.counts["text"][0].sum(-1).tolist())) == 1
    (patches,) = seen.patches
    assert (patches.grid, len(patches.kept), len(patches.core)) == ((3, 4), 6, 2)
    assert set(patches.core) <= set(patches.kept)
    for draw in (figures.routing, figures.coverage, figures.similarity):
        assert figures.svg(draw(seen)).startswith(b"<?xml")
    assert figures.svg(figures.kept_patches(seen.patches)).startswith(b"<?xml")


def test_coverage_is_a_mean_over_requests_of_what_the_busiest_take() -> None:
    counts = torch.ones(2, 1, 40)
    counts[1, 0, :20] = 3
    seen = Observation((0,), 0, {"text": counts}, torch.zeros(2, 1, 4), (), 0.5, "affinity")
    assert seen.coverage("text").tolist() == [(0.5 + 0.75) / 2]


def test_the_time_line_shows_the_longest_request_to_its_end() -> None:
    def run(seconds: float) -> tuple[list[Span], list[Read]]:
        spans = [
            Span("layer", 0, 0, 0, 5.0, 5.0 + seconds / 2),
            Span("stall", 0, 1, 0, 5.0 + seconds / 2, 5.0 + seconds),
        ]
        return spans, [Read((ExpertId(0, 0),), True, 5.0, 5.1)]

    figure = figures.timeline({"slow": run(2.0), "quick": run(1.0)})
    assert [ax.get_xlim() for ax in figure.axes[::2]] == [(0, pytest.approx(2000, rel=0.1))] * 2
    assert figures.svg(figure)
