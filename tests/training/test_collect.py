"""From images to routing logs: skips what is bad, goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vismmoe.config import CollectConfig
from vismmoe.errors import CorpusError
from vismmoe.metrics import hot_recall
from vismmoe.trace import read_traces
from vismmoe_training.collect import collect


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(3):
        noise = np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")
    return folder


def settings(model: Path, images: Path, output: Path, **changes: Any) -> CollectConfig:
    told = {"max_new_tokens": 3, "keep_ratio": 0.5, "threads": 1, "shard_items": 2, **changes}
    return CollectConfig(model=str(model), images=str(images), output=str(output), **told)


def test_logs_hold_every_forward_and_layer_of_every_good_image(
    tiny_checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    (images / "1.png").write_bytes(b"<html>no image</html>")
    summary = collect(settings(tiny_checkpoint, images, tmp_path / "logs"))
    assert (summary.items, summary.already_there) == (2, 0)
    assert [name for name, _ in summary.skipped] == ["1.png"]
    assert "1 items skipped:\n  1.png: " in str(summary)
    traces = read_traces([tmp_path / "logs"])
    spec = traces.header.spec
    assert [request.item for request in traces.requests] == ["0.png", "2.png"]
    assert traces.header.keep_ratio == 0.5
    for number, request in enumerate(traces.requests):
        assert request.kept_visual_tokens == request.visual_tokens // 2
        rows = int((traces.request == number).sum())
        assert rows == request.completion_tokens * len(spec.moe_layers)
    decode = traces.decode
    assert (traces.counts[decode].sum(1) == spec.top_k).all()
    assert hot_recall(traces.own_gate[decode], traces.counts[decode] > 0, spec.top_k) == 1.0


def test_going_on_does_only_what_is_missing(tiny_checkpoint: Path, images: Path, tmp_path: Path) -> None:
    output = tmp_path / "logs"
    collect(settings(tiny_checkpoint, images, output, limit=1))
    with pytest.raises(CorpusError, match="--resume"):
        collect(settings(tiny_checkpoint, images, output))
    summary = collect(settings(tiny_checkpoint, images, output, resume=True))
    assert (summary.items, summary.already_there) == (2, 1)
    assert [request.item for request in read_traces([output]).requests] == ["0.png", "1.png", "2.png"]
    with pytest.raises(CorpusError, match="keep_ratio"):
        collect(settings(tiny_checkpoint, images, output, resume=True, keep_ratio=1.0))


def test_a_corpus_without_one_good_image_is_refused_and_leaves_nothing(
    tiny_checkpoint: Path, images: Path, tmp_path: Path
) -> None:
    for path in images.iterdir():
        path.write_bytes(b"")
    with pytest.raises(CorpusError, match="None of the 3 images"):
        collect(settings(tiny_checkpoint, images, tmp_path / "logs"))
    assert not (tmp_path / "logs").exists()
