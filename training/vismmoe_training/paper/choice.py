"""The stated rule by which the default compressor is chosen: accuracy against unique experts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from vismmoe_training.paper.answers import VANILLA, Answers, Key, Part, everything
from vismmoe_training.paper.paired import Difference, difference
from vismmoe_training.paper.spread import Figure

BASELINES = ("random", "uniform", "downsample")  # look at nothing: to be beaten, not to be chosen
ENOUGH = {0.7: 0.98, 0.5: 0.95}  # of vanilla's accuracy
RULE = (
    "of the methods that keep 98 % of vanilla's accuracy at 70 % of the tokens and 95 % at 50 %, and are not below "
    "saliency by more than the spread over seeds at 50 %, the one whose deeper layers need the fewest experts at 50 %; "
    "baselines that look at nothing do not stand for election"
)


WHOLE: Key = (VANILLA, 1.0)


def retention(answers: Sequence[Answers], key: Key, part: Part = everything) -> Figure:
    """Right answers as a share of vanilla's to the same questions, seed by seed; 0 where vanilla has none right."""
    asked = [(a, a.asked(key, part)) for a in answers]
    return Figure.of([sum(a.right(key, these)) / max(1, sum(a.right(WHOLE, these))) for a, these in asked])


def beyond(answers: Sequence[Answers], key: Key, other: Key, part: Part = everything) -> Difference:
    """By how much `key` keeps more of vanilla's right answers than `other`, all seeds together."""
    both = [[number for number in a.asked(key, part) if number in a.outcomes[other].right] for a in answers]
    ours, theirs, whole = (
        [right for a, numbers in zip(answers, both, strict=True) for right in a.right(which, numbers)]
        for which in (key, other, WHOLE)
    )
    seen = [(seed, answers[seed].posed[number]) for seed, numbers in enumerate(both) for number in numbers]
    units = [((seed, posed.kind), posed.asked.image) for seed, posed in seen]
    return difference(ours, theirs, whole, units)


def unique_experts(answers: Sequence[Answers], key: Key) -> Figure:
    """Distinct experts that a deeper layer needs in the prefill: mean over layers and the questions that all were
    asked, seed by seed."""
    return Figure.of([statistics.fmean(a.outcomes[key].unique[n] for n in a.asked_of_all()) for a in answers])


def winner(kept: Mapping[Key, Figure], unique: Mapping[Key, Figure]) -> str | None:
    """The method that RULE names; None when no method keeps enough."""
    saliency = kept["saliency", 0.5]
    able = [
        method
        for method in sorted({method for method, _ in kept} - {VANILLA, *BASELINES})
        if all((method, ratio) in kept for ratio in ENOUGH)
        and all(kept[method, ratio].mean >= share for ratio, share in ENOUGH.items())
        and kept[method, 0.5].mean >= saliency.mean - max(saliency.spread, kept[method, 0.5].spread)
    ]
    return min(able, key=lambda method: unique[method, 0.5].mean, default=None)
