"""`python -m vismmoe_training.paper.docs`: bring the tables of docs/ in line with benchmarks/results/paper.json.

A table stands between `<!-- paper.json: NAME -->` and `<!-- end -->`; a test holds the two together.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vismmoe_training.paper import published
from vismmoe_training.paper.__main__ import JSON

FILES = ("docs/predictor.md", "docs/compressors.md")
TOP, RATIOS = ("10", "20", "30"), ("0.7", "0.5", "0.3")
SHOWN = ("affinity-bytes", "affinity-prompt", "affinity", "saliency", "random")
RULES = {"lookahead": "guided"}  # named otherwise in the docs
OLDER = "The committed run is older than this table: `make paper` makes it."
Told = Mapping[str, Any]


def recall(told: Told) -> str:
    """Decode, blended, beside the published figures; what the network reaches without one of its features."""
    head = ["hot recall, decode, W = 5", *(f"@{k}" for k in TOP), "@20 at d = 1, 2, 3, 4, 5"]
    rows = [["the paper, on its own models", *(f"{100 * share:.1f}" for share in published.HOT_RECALL.values()), ""]]
    for rule, found in told["hot_recall"].items():
        along = " ".join(f"{100 * found['20'][str(d)]['mean']:.1f}" for d in range(1, 6))
        rows.append([RULES.get(rule, rule), *(_spread(found[k]["blended"]) for k in TOP), along])
    for name, found in told["features"].items():
        rows.append([f"guided, without the {name}", *(_spread(found[k]) for k in TOP), ""])
    return _table(head, rows)


def union(told: Told) -> str:
    """One list for all five layers, as the published measure reads by its words."""
    found = told["hot_recall_union"]
    best = {f"-{k}": found["published network"][f"-{k}"] for k in TOP}
    rows = [["the best list", *(_spread(best[f"-{k}"]) for k in TOP)]]
    rows += [[RULES.get(rule, rule), *(_spread(cells[k]) for k in TOP)] for rule, cells in found.items()]
    return _table(["one list for five layers", *(f"@{k}" for k in TOP)], rows)


def curve(told: Told) -> str:
    """Accuracy against experts; the winner of the rule."""
    kept, unique = told["accuracy"], told["unique_experts"]
    methods = sorted((m for m in kept if "0.5" in kept[m]), key=lambda m: float(unique[m]["0.5"]["mean"]))
    rows = [[m, *(_cells(cells[m], scale) for cells, scale in ((kept, 100), (unique, 1)))] for m in methods]
    head = ["kept: 70 / 50 / 30 %", "right answers, % of vanilla's", "experts a deeper layer"]
    first = f"Vanilla: {_spread(kept['vanilla']['1.0'])} % right, {unique['vanilla']['1.0']['mean']:.1f} experts."
    return f"{_table(head, rows)}\n\n{first} The rule names {told['default_compressor']['winner'] or 'nobody'}."


def against_random(told: Told) -> str:
    """Points of vanilla's by which a method keeps more than random dropping, with the middle 95 % of the draws."""
    found = told.get("beyond_random")
    if found is None:
        return OLDER
    parts = list(found["affinity"])
    rows = [
        [f"{m}, {100 * float(ratio):.0f} %", *(_difference(found[m][part][ratio]) for part in parts)]
        for ratio in RATIOS
        for m in SHOWN
        if m in found
    ]
    return _table(["beyond random dropping, points", *parts], rows)


def half(told: Told) -> str:
    """At half of the tokens, by kind of scene and of question."""
    parts = told.get("accuracy_at_half_by_part")
    if parts is None:
        return OLDER
    rows = [["questions", *(str(part["questions"]) for part in parts.values())]]
    rows.append(["vanilla, % right", *(_spread(part["vanilla"], 0) for part in parts.values())])
    rows += [[m, *(_spread(part[m], 0) for part in parts.values())] for m in SHOWN]
    return _table(["50 % kept, % of vanilla's", *parts], rows)


TABLES: Mapping[str, Callable[[Told], str]] = {
    "recall": recall, "union": union, "curve": curve, "against random": against_random, "half": half,
}  # fmt: skip


def brought_in_line(text: str, told: Told) -> str:
    """The text with every table made anew. KeyError for a name that is none of TABLES."""
    pattern = re.compile(r"(<!-- paper\.json: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}{TABLES[found[2]](told)}\n{found[3]}", text)


def main() -> int:
    told = json.loads(Path(JSON).read_text(encoding="utf-8"))
    for name in FILES:
        path = Path(name)
        path.write_text(brought_in_line(path.read_text(encoding="utf-8"), told), encoding="utf-8")
    return 0


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _spread(figure: Mapping[str, float], digits: int = 1) -> str:
    return f"{100 * figure['mean']:.{digits}f} ± {100 * figure['spread']:.{digits}f}"


def _cells(by_ratio: Mapping[str, Mapping[str, float]], scale: int) -> str:
    return " / ".join(f"{scale * by_ratio[r]['mean']:.1f}" if r in by_ratio else "-" for r in RATIOS)


def _difference(found: Mapping[str, float]) -> str:
    return f"{100 * found['value']:+.1f} ({100 * found['low']:+.1f} to {100 * found['high']:+.1f})"


if __name__ == "__main__":
    sys.exit(main())
