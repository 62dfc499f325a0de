"""`python -m vismmoe_training.paper`: collect, train, answer, compare; prints the tables and writes paper.json."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vismmoe.config import REFERENCE_MODEL, in_clone
from vismmoe.errors import CorpusError
from vismmoe.failures import guarded, quieten
from vismmoe_training.paper.scale import FULL, REDUCED, Paper

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
    from vismmoe_training.paper.run import run

    text, figures = run(paper)
    print(text, flush=True)
    target = Path(given.json)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


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
