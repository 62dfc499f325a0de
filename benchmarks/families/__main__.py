"""Tries every family of the catalogue on a tiny random checkpoint in its published layout and prints the table.

python benchmarks/families                  all of them (about two minutes of one core)
python benchmarks/families mixtral gpt_oss  these
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from matrix import HEADINGS, failure, row_of

from vismmoe.models.catalogue import FAMILIES, REFUSED


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    failed = 0
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float32 on one CPU thread\n")
    print("| " + " | ".join(HEADINGS) + " |")
    print("|---" * len(HEADINGS) + "|", flush=True)
    for name in names or [name for name, family in FAMILIES.items() if ":" not in family.model_class]:
        try:
            row = row_of(FAMILIES[name])
            failed += not row.holds
            print("| " + " | ".join(row.cells()) + " |", flush=True)
        except Exception as error:
            failed += 1
            print(f"| {name} | fails: {failure(error)} |", flush=True)
    if not names:
        print("\nRefused by name:\n")
        print("\n".join(f"- {name}: {reason}" for name, reason in REFUSED.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
