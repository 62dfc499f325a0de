"""How often a predictor's ranks come true, learnt while it runs (ours).

A score is no chance, and a list of fixed length loads much that nobody asks for. What was foreseen d layers ahead at
rank r is looked up again when that layer's router has spoken; hits and trials of each (d, r) give the chance with which
the next expert at that place is needed. Absent experts have tables of their own: what is not resident has not been
wanted lately, so that the same rank means less. Nothing must be loaded to learn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import NamedTuple

from vismmoe.types import ExpertId

_PRIOR_TRIALS = 4.0  # how many trials the first guess at a chance is worth
_PRIOR_LIKELY = 0.6  # of a rank within the top k, one layer ahead; it fades with the distance
_PRIOR_UNLIKELY = 0.15  # of a rank beyond
_MEMORY = 256.0  # trials after which old ones begin to fade, since text changes


class Place(NamedTuple):
    """Where a forecast named an expert."""

    distance: int  # layers ahead, from 1
    rank: int  # from 0
    present: bool  # whether it had a slab already


class Confidence:
    """Counts of one predictor; not to be shared by threads."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._hits: dict[Place, float] = {}
        self._trials: dict[Place, float] = {}
        self._open: defaultdict[int, list[tuple[ExpertId, Place]]] = defaultdict(list)

    def chance(self, place: Place) -> float:
        """That an expert named there is needed when its layer runs."""
        prior: float = (_PRIOR_LIKELY if place.rank < self._top_k else _PRIOR_UNLIKELY) / place.distance**0.5
        hits, trials = self._hits.get(place, 0.0), self._trials.get(place, 0.0)
        return (hits + prior * _PRIOR_TRIALS) / (trials + _PRIOR_TRIALS)

    def foreseen(self, layer: int, named: Iterable[tuple[ExpertId, Place]]) -> None:
        """Experts of a layer ahead were named."""
        self._open[layer].extend(named)

    def learn(self, layer: int, needed: Container[ExpertId]) -> None:
        """The layer's router has spoken."""
        for expert, place in self._open.pop(layer, ()):
            hits, trials = self._hits.get(place, 0.0), self._trials.get(place, 0.0)
            if trials >= _MEMORY:
                hits, trials = hits / 2, trials / 2
            self._hits[place], self._trials[place] = hits + (expert in needed), trials + 1

    def begin_request(self) -> None:
        """What an earlier request foresaw and never came to is no trial."""
        self._open.clear()
