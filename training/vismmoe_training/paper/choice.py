"""The stated rule by which the default compressor is chosen: accuracy against unique experts."""

from __future__ import annotations

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
    """Right answers as a share of vanilla's, seed by seed; 0 where vanilla has none right."""
    return Figure.of([sum(a.right(key, part)) / max(1, sum(a.right(WHOLE, part))) for a in answers])


def beyond(answers: Sequence[Answers], key: Key, other: Key, part: Part = everything) -> Difference:
    """By how much `key` keeps more of vanilla's right answers than `other`, all seeds together."""
    ours, theirs, whole = ([r for a in answers for r in a.right(which, part)] for which in (key, other, WHOLE))
    units = [((s, p.kind), p.asked.image) for s, a in enumerate(answers) for p in a.posed if part(p)]
    return difference(ours, theirs, whole, units)


def unique_experts(answers: Sequence[Answers], key: Key) -> Figure:
    """Distinct experts that a deeper layer needs in the prefill: mean over questions and layers, seed by seed."""
    return Figure.of([sum(a.outcomes[key].unique) / len(a.outcomes[key].unique) for a in answers])


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
