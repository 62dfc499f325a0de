"""Run the model over a corpus in recording mode and write routing logs; going on after a kill repeats nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from vismmoe.config import CollectConfig
from vismmoe.engine import Engine, Recording, Request
from vismmoe.errors import CorpusError, ImageError, UsageError
from vismmoe.exclusive import only_writer
from vismmoe.trace import TraceHeader, TraceWriter, refuse_existing
from vismmoe_training.corpus import Corpus, CorpusItem, open_corpus
from vismmoe_training.progress import track

LOGGED_WINDOW = 8  # distances of next gate in a log: as far as a predictor trained on it can look


class Recorder(Protocol):
    """What collecting needs of an Engine."""

    def record(self, request: Request, *, request_id: int, item: str, window: int) -> Recording: ...


@dataclass(frozen=True)
class CollectSummary:
    """What `vismmoe collect` says at its end."""

    output: Path
    items: int  # written by this run
    already_there: int
    rows: int
    seconds: float
    skipped: tuple[tuple[str, str], ...]  # (item, why)

    def __str__(self) -> str:
        rate = self.items / self.seconds if self.seconds else 0.0
        lines = [f"{self.items} items, {self.rows} rows in {self.seconds:.1f} s ({rate:.1f} items/s): {self.output}"]
        if self.already_there:
            lines.append(f"{self.already_there} items were there already.")
        if self.skipped:
            lines.append(f"{len(self.skipped)} items skipped:")
            lines += [f"  {item}: {' '.join(why.split())}" for item, why in self.skipped]
        return "\n".join(lines)


def collect(config: CollectConfig) -> CollectSummary:
    """Log the routing of a corpus. Raises CorpusError, CheckpointError, BudgetError; bad images are only skipped."""
    corpus = open_corpus(config.images, config.prompt, Path(config.image_folder) if config.image_folder else None)
    refuse_existing(Path(config.output), config.resume)
    with only_writer(Path(config.output)), Engine.load(config) as engine:
        header = TraceHeader(
            spec=engine.spec,
            keep_ratio=config.keep_ratio,
            compressor=config.compressor,
            window=LOGGED_WINDOW,
            settings=_settings(config, engine.prefix_layers),
        )
        with TraceWriter(Path(config.output), header, config.resume, config.shard_items) as writer:
            return record_corpus(engine, corpus, writer, config)


def record_corpus(engine: Recorder, corpus: Corpus, writer: TraceWriter, config: CollectConfig) -> CollectSummary:
    """Every item that the folder lacks, in the corpus's order."""
    started, before, rows = time.monotonic(), len(writer.items), 0
    skipped: list[tuple[str, str]] = []
    sizes = [size for size in (corpus.size, config.limit) if size is not None]
    total = max(min(sizes) - before, 0) if sizes else None
    for item in track(_missing(islice(corpus, config.limit), writer), total, "collect"):
        try:
            recording = engine.record(_request(item, config), request_id=0, item=item.name, window=LOGGED_WINDOW)
        except (ImageError, UsageError) as error:  # a question may hold what only the model may say
            skipped.append((item.name, str(error)))
            continue
        rows += len(recording.routing)
        writer.add(recording.request, recording.routing)
    done = len(writer.items) - before
    if skipped and not writer.items:
        raise CorpusError(f"None of the {len(skipped)} images could be read; the first: {skipped[0][1]}")
    return CollectSummary(writer.folder, done, before, rows, time.monotonic() - started, tuple(skipped))


def _missing(items: Iterable[CorpusItem], writer: TraceWriter) -> Iterator[CorpusItem]:
    there = frozenset(writer.items)
    return (item for item in items if item.name not in there)


def _request(item: CorpusItem, config: CollectConfig) -> Request:
    return Request(
        images=(item.image,),
        prompt=item.prompt,
        max_new_tokens=config.max_new_tokens,
        keep_ratio=config.keep_ratio,
        compressor=config.compressor,
    )


def _settings(config: CollectConfig, prefix_layers: int) -> dict[str, float]:
    """What else decides which experts run. alpha and lambda are affinity's alone, and nothing is dropped at ratio 1."""
    told: dict[str, float] = {"prefix_layers": prefix_layers, "max_new_tokens": config.max_new_tokens}
    if config.compressor.startswith("affinity") and config.keep_ratio < 1:
        told |= {"salient_ratio": config.salient_ratio, "trade_off": config.trade_off}
    return told
