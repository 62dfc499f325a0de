"""Planned memory against the measured peak: budgets from the least to everything, short and long answers and prompts.

    python benchmarks/plan_vs_peak.py

Each row is a process of its own, since memory that a process has given back is not seen again by the next request.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from vismmoe.config import REFERENCE_MODEL
from vismmoe.sizes import format_size
from vismmoe.talk import table

_WORD = "What is this? "


@dataclass(frozen=True)
class Row:
    """One process: share of the way from the least budget to everything resident, and the request."""

    share: float
    words: int  # of the prompt
    answer: int  # tokens
    picture: bool = True


ROWS = (
    Row(0.0, 1, 2),
    Row(0.0, 1, 700),
    Row(0.0, 80, 4),
    Row(0.3, 1, 40),
    Row(0.3, 1, 700),
    Row(0.3, 80, 40),
    Row(0.6, 1, 300),
    Row(0.6, 80, 100),
    Row(1.0, 1, 300),
    Row(1.0, 80, 40),
)


def run(model: str, row: Row) -> dict[str, int]:
    """Planned and measured bytes of one request in this process."""
    from PIL import Image

    from vismmoe.config import EngineConfig
    from vismmoe.engine import Engine, Request
    from vismmoe.planning import plan_for_request

    pictures = (Image.new("RGB", (256, 256), (200, 30, 30)),) if row.picture else ()
    request = Request(pictures, _WORD * row.words, row.answer)
    least = plan_for_request(EngineConfig(model=model), pictures, request.prompt, row.answer)
    budget = least.minimum_bytes + int(row.share * (least.all_resident_bytes - least.minimum_bytes))
    with Engine.load(EngineConfig(model=model, device_memory=budget), request=request) as engine:
        engine._stop = [1 << 30]  # no such token: the answer is as long as asked for
        told = engine.generate(request)
    return {
        "prompt": told.usage.prompt_tokens,
        "answer": told.usage.completion_tokens,
        "planned": told.memory.device_planned_bytes,
        "peak": told.memory.device_peak_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Planned memory against the measured peak.")
    parser.add_argument("--model", default=REFERENCE_MODEL)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(run(asked.model, Row(**json.loads(asked.row)))))
        return
    found = []
    for row in ROWS:
        words = [sys.executable, __file__, "--model", asked.model, "--row", json.dumps(asdict(row))]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        found.append({"share": row.share, **json.loads(done.stdout)})
    cells = [
        (f"{r['share']:.0%}", r["prompt"], r["answer"], format_size(r["planned"]), format_size(r["peak"]),
         f"{r['peak'] / r['planned']:.3f}")
        for r in found
    ]  # fmt: skip
    print(table(cells, ("budget", "prompt", "answer", "planned", "peak", "ratio")))
    if asked.json:
        asked.json.write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
