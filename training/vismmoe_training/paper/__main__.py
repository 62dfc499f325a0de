"""`python -m vismmoe_training.paper`: collect, train, answer, compare; prints the tables and writes paper.json.

Seeds run beside each other, one thread each. The routing logs of the training scenes are collected once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from vismmoe.config import REFERENCE_MODEL, CollectConfig, in_clone
from vismmoe.errors import CorpusError
from vismmoe.failures import guarded, quieten
from vismmoe_training.paper.scale import ANSWER_TOKENS, FIRST_SEED, FULL, LOGGED_RATIO, REDUCED, SPECS, Paper

JSON = "benchmarks/results/paper.json"


def main(words: Sequence[str] | None = None) -> int:
    """Exit status as for the commands."""
    given = _parser().parse_args(words)
    quieten()
    return guarded("paper", lambda: _main(given), given.debug)


def _main(given: argparse.Namespace) -> int:
    corpus = in_clone("datasets/scenes/train")
    if corpus is None:
        raise CorpusError("The paper's tables need datasets/scenes/train: run them from a clone.")
    scale = REDUCED if given.reduced else FULL
    paper = Paper(given.model, corpus, Path(given.output), scale, given.workers)
    text, figures = run(paper)
    print(text, flush=True)
    target = Path(given.json)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


def run(paper: Paper) -> tuple[str, dict[str, object]]:
    """The tables and the same figures as plain values."""
    from vismmoe_training.paper.ablation import ablate
    from vismmoe_training.paper.answers import answer_seed
    from vismmoe_training.paper.foresight import foresee_seed
    from vismmoe_training.paper.tables import Results

    started = time.monotonic()
    seeds = range(paper.scale.seeds)
    shutil.rmtree(paper.output, ignore_errors=True)
    _draw(paper)
    with ProcessPoolExecutor(paper.workers, mp_context=get_context("spawn")) as pool:
        _say("collecting routing logs")
        names = ["train", *(f"{kind}-{seed}" for seed in seeds for kind in SPECS)]
        for done in [pool.submit(_collect, paper, name) for name in names]:
            done.result()
        _say(f"{time.monotonic() - started:.0f} s; training predictors, answering questions")
        foreseen = [pool.submit(foresee_seed, paper, seed) for seed in seeds]
        answered = [pool.submit(answer_seed, paper, seed) for seed in seeds]
        foresights, answers = [f.result() for f in foreseen], [a.result() for a in answered]
    _say(f"{time.monotonic() - started:.0f} s; ablation")
    results = Results(paper, foresights, answers)
    results.ablations = [ablate(paper, seed, foresights[seed].net, results.default) for seed in seeds]
    results.seconds = time.monotonic() - started
    return str(results), results.to_json()


def _draw(paper: Paper) -> None:
    from vismmoe_training.scenes.corpus import write_corpus

    for seed in range(paper.scale.seeds):
        for number, (kind, spec) in enumerate(SPECS.items()):
            count = paper.scale.heldout_images // len(SPECS)
            write_corpus(paper.scenes(seed, kind), count, FIRST_SEED + 10 * seed + number, spec)


def _collect(paper: Paper, name: str) -> None:
    from vismmoe_training.collect import collect

    images = paper.train_corpus if name == "train" else paper.output / f"scenes-{name}"
    collect(
        CollectConfig(
            model=paper.model,
            device="cpu",
            threads=1,
            images=str(images),
            output=str(paper.logs(name)),
            limit=paper.scale.train_images if name == "train" else None,
            keep_ratio=LOGGED_RATIO,
            max_new_tokens=ANSWER_TOKENS,
        )
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vismmoe_training.paper", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--reduced", action="store_true", help="a few images and questions only: the figures mean nothing"
    )
    parser.add_argument("--model", default=REFERENCE_MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--output", default="runs/paper", metavar="DIR", help="made anew; default: %(default)s")
    parser.add_argument("--json", default=JSON, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes, one thread each; default: 2")
    parser.add_argument("--debug", action="store_true", help="show the traceback when something fails")
    return parser


if __name__ == "__main__":
    sys.exit(main())
