"""The tables of the docs are those of the committed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vismmoe_training.paper.__main__ import JSON
from vismmoe_training.paper.docs import FILES, brought_in_line

CLONE = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", FILES)
def test_the_docs_show_the_figures_of_the_run(name: str) -> None:
    told = json.loads((CLONE / JSON).read_text(encoding="utf-8"))
    text = (CLONE / name).read_text(encoding="utf-8")
    assert "<!-- paper.json: " in text
    # python -m vismmoe_training.paper.docs writes them
    assert brought_in_line(text, told) == text


def test_what_stands_between_the_marks_is_replaced_and_nothing_else() -> None:
    figure = {"mean": 0.5, "spread": 0.1}
    told = {
        "hot_recall_union": {"published network": {f"{sign}{k}": figure for k in (10, 20, 30) for sign in ("", "-")}}
    }
    text = "before\n<!-- paper.json: union -->\nold\n<!-- end -->\nafter\n"
    found = brought_in_line(text, told)
    assert found.startswith("before\n<!-- paper.json: union -->\n| one list for five layers | @10 |")
    assert "| published network | 50.0 ± 10.0 |" in found
    assert found.endswith("|\n<!-- end -->\nafter\n")
    assert brought_in_line(found, told) == found
