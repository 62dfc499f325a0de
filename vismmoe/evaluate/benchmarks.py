"""The benchmarks that `vismmoe eval` knows, and the check of what a user hands over as their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from vismmoe.errors import CorpusError, UsageError
from vismmoe.evaluate.mmbench import MMBENCH
from vismmoe.evaluate.mme import MME
from vismmoe.evaluate.ocrbench import OCRBENCH
from vismmoe.evaluate.pope import POPE
from vismmoe.evaluate.score import Benchmark, PromptSet, Row, Scorer
from vismmoe.evaluate.textvqa import TEXTVQA

Thing = TypeVar("Thing")

BENCHMARKS: Mapping[str, Benchmark] = {each.name: each for each in (MME, MMBENCH, POPE, OCRBENCH, TEXTVQA)}


def scorer_of(benchmark: Benchmark, name: str) -> Scorer:
    """UsageError for a name that the benchmark does not know."""
    return _known(benchmark.scorers, name, f"{benchmark.title} has no scorer")


def prompts_of(benchmark: Benchmark, name: str) -> PromptSet:
    """UsageError for a name that the benchmark does not know."""
    return _known(benchmark.prompts, name, f"{benchmark.title} has no prompt set")


def checked(benchmark: Benchmark, row: Row, where: str) -> Row:
    """The row in one spelling. CorpusError names `where` it stands and what is wrong with it."""
    for names in benchmark.required:
        if all(row.get(name) is None for name in names):
            raise CorpusError(f"{where} has no {' or '.join(names)}: {benchmark.title} needs one in every row.")
    try:
        return benchmark.normal(row)
    except ValueError as error:
        raise CorpusError(f"{where}: {error}.") from None


def checked_all(benchmark: Benchmark, rows: Iterable[tuple[str, Row]]) -> list[Row]:
    """The same for (where, row) pairs; CorpusError when there are none."""
    found = [checked(benchmark, row, where) for where, row in rows]
    if not found:
        raise CorpusError(f"there is no row of {benchmark.title} to evaluate.")
    return found


def _known(things: Mapping[str, Thing], name: str, what: str) -> Thing:
    if name not in things:
        raise UsageError(f"{what} {name!r}: it has {', '.join(things)}.")
    return things[name]
