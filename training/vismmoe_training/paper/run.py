"""The whole run: seeds beside each other, one thread each; the training scenes' routing is logged once for all."""

from __future__ import annotations

import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from vismmoe.config import CollectConfig
from vismmoe_training.collect import collect
from vismmoe_training.paper.ablation import ablate, simulator_errors
from vismmoe_training.paper.answers import answer_seed
from vismmoe_training.paper.foresight import foresee_seed
from vismmoe_training.paper.scale import ANSWER_TOKENS, DTYPE, FIRST_SEED, LOGGED_RATIO, SPECS, Paper
from vismmoe_training.paper.spread import Figure
from vismmoe_training.paper.tables import Results
from vismmoe_training.scenes.corpus import write_corpus


def run(paper: Paper) -> tuple[str, dict[str, object]]:
    """The tables and the same figures as plain values."""
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
    errors = simulator_errors(paper, 0)
    results.simulator_errors = {name: Figure.of([error]) for name, error in errors.items()}
    results.seconds = time.monotonic() - started
    return str(results), results.to_json()


def _draw(paper: Paper) -> None:
    for seed in range(paper.scale.seeds):
        for number, (kind, spec) in enumerate(SPECS.items()):
            place = paper.scenes(seed, kind)
            write_corpus(place, paper.scale.heldout_images, FIRST_SEED + 10 * seed + number, spec)


def _collect(paper: Paper, name: str) -> None:
    images = paper.train_corpus if name == "train" else paper.output / f"scenes-{name}"
    collect(
        CollectConfig(
            model=paper.model,
            device="cpu",
            threads=1,
            compute_dtype=DTYPE,
            images=str(images),
            output=str(paper.logs(name)),
            limit=paper.scale.train_images if name == "train" else paper.scale.logged_images,
            keep_ratio=LOGGED_RATIO,
            max_new_tokens=ANSWER_TOKENS,
        )
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
