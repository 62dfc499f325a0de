"""What a scorer is made of: how one answer is read, and what all readings add up to.

The two steps are apart so that a bootstrap can add up other selections of the same readings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]  # one row of a benchmark: its fields, and under "prediction" what was answered


@dataclass(frozen=True)
class Reading:
    """What a scorer makes of one row."""

    row: Row
    score: float  # of this answer alone
    unit: str  # rows that are judged together (a pair, the passes of a question) and drawn together by a bootstrap
    stratum: str = ""  # a bootstrap draws as many units of each stratum as there are
    label: str | None = None  # how the answer was understood
    extra: Mapping[str, Any] = field(default_factory=dict)  # what else this scorer tells of a row
    place: int = 0  # of the row among those that were given


@dataclass(frozen=True)
class Score:
    """All numbers of one scorer, under the names that it gives them."""

    headline: str  # which of `values` is the one number, as "name" or "name.name"
    unit: str  # what the headline counts: "of 2800", "%", ...
    values: Mapping[str, Any]  # numbers, None where undefined, and mappings of such
    undefined: Mapping[str, str] = field(default_factory=dict)  # name -> why the scorer defines no number
    notes: tuple[str, ...] = ()

    @property
    def value(self) -> float | None:
        """The headline's number; None: undefined."""
        found: Any = self.values
        for name in self.headline.split("."):
            found = found[name]
        return None if found is None else float(found)


@dataclass(frozen=True)
class Scorer:
    """One community's way to score one benchmark."""

    name: str
    source: str  # whose code it follows, and which version
    read: Callable[[Sequence[Row]], list[Reading]]
    total: Callable[[Sequence[Reading]], Score]

    def __call__(self, rows: Sequence[Row]) -> tuple[Score, list[Reading]]:
        """The score of these rows and how each was read, in their order but for rows that a scorer splits up."""
        readings = self.read(rows)
        return self.total(readings), readings


@dataclass(frozen=True)
class PromptSet:
    """One harness's way to ask."""

    name: str
    text: Callable[[Row], str]


@dataclass(frozen=True)
class Benchmark:
    """What `vismmoe eval` knows of one benchmark."""

    name: str
    title: str
    required: tuple[tuple[str, ...], ...]  # fields of a row; each may go by several names
    prompts: Mapping[str, PromptSet]
    scorers: Mapping[str, Scorer]
    max_new_tokens: Mapping[str, int]  # by scorer: the harness's own limit
    normal: Callable[[Row], Row]  # brings the spellings of a row's fields to one; ValueError says what is wrong
    unit: Callable[[Row], str] | None  # what is judged together with others; None: each row by itself


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float | None]:
    """`values` as one level, names joined by dots; lists are left out."""
    found: dict[str, float | None] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat_numbers(value, f"{prefix}{name}."))
        elif value is None or isinstance(value, (int, float)):
            found[prefix + name] = value
    return found


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one number."""
    return sum(values) / len(values)
