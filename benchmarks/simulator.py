"""How far the simulator's stall is from the runtime's, on this machine: three budgets, on demand and with next gate.

    python benchmarks/simulator.py [--questions 6] [--disk-rate 20MB] [--json FILE]

The reference model answers questions on held-out scenes with its reads slowed to a known rate, since its own (24 KB out
of the page cache) are shorter than a thread's waking up; then its own routing is replayed on a profile measured
in the same run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vismmoe.config import REFERENCE_MODEL, EngineConfig, in_clone
from vismmoe.errors import CorpusError
from vismmoe.request import Request
from vismmoe.simulate.agreement import agreement_table, compare_with_runtime
from vismmoe.sizes import parse_size
from vismmoe_training.arms import read_questions

CORPUS = "datasets/scenes/heldout"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REFERENCE_MODEL)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--keep-ratio", type=float, default=0.5)
    parser.add_argument("--disk-rate", type=parse_size, default="20MB")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    corpus = in_clone(CORPUS)
    if corpus is None:
        raise CorpusError(f"{CORPUS} is not here: run this from a clone of the project.")
    requests = [
        Request((asked.image,), asked.prompt, max_new_tokens=12, keep_ratio=given.keep_ratio)
        for asked in read_questions(corpus, given.questions)
    ]
    found = compare_with_runtime(EngineConfig(model=given.model, device="cpu", disk_rate=given.disk_rate), requests)
    print(agreement_table(found))
    if given.json:
        given.json.write_text(json.dumps({"rows": [one.to_json() for one in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
