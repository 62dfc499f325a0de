"""`python -m vismmoe_training.scenes FOLDER --seed N`: draw scenes with questions, of each kind a folder of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vismmoe.errors import UsageError
from vismmoe.failures import guarded
from vismmoe_training.scenes.corpus import write_corpus
from vismmoe_training.scenes.mixes import MIXES


def main(words: Sequence[str] | None = None) -> int:
    """Exit status as for the commands."""
    given = _parser().parse_args(words)
    return guarded("scenes", lambda: _main(given), given.debug)


def _main(given: argparse.Namespace) -> int:
    for number, kind in enumerate(given.kind):
        try:
            print(write_corpus(Path(given.folder) / kind, given.count, given.seed + number, MIXES[kind]))
        except ValueError as error:
            raise UsageError(f"{error}: name another folder.") from None
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vismmoe_training.scenes", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", metavar="FOLDER", help="made if missing; what is there already is not touched")
    parser.add_argument("--seed", type=int, required=True, help="the same seed draws the same scenes; kinds count on")
    parser.add_argument("--count", type=int, default=32, metavar="N", help="scenes of each kind; default: 32")
    parser.add_argument("--kind", nargs="+", choices=list(MIXES), default=list(MIXES), help="default: all")
    parser.add_argument("--debug", action="store_true", help="show the traceback when something fails")
    return parser


if __name__ == "__main__":
    sys.exit(main())
