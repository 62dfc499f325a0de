"""The published accuracy and coverage tables: every compressor at every keep ratio answers the same questions."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vismmoe.config import EngineConfig
from vismmoe.engine import Engine, Request
from vismmoe.metrics import coverage
from vismmoe.session import Session
from vismmoe.types import LayerState
from vismmoe_training.arms import Asked, read_questions, same
from vismmoe_training.paper.scale import ANSWER_TOKENS, ARMS, DTYPE, HALF, MAIN, SPECS, Paper

VANILLA = "vanilla"
TOP = 20  # experts whose share of the routed tokens is the coverage
Key = tuple[str, float]  # compressor, keep ratio


@dataclass(frozen=True)
class Posed:
    """A question and the kind of scene that it is about."""

    kind: str
    asked: Asked


Part = Callable[[Posed], bool]


def everything(posed: Posed) -> bool:
    return True


@dataclass
class Outcome:
    """What one compressor did with the questions that it was asked, at one keep ratio."""

    right: dict[int, bool] = field(default_factory=dict)  # exact match; this and all below by number of the question
    unique: dict[int, float] = field(default_factory=dict)  # distinct experts a deeper layer needs in the prefill
    kept: dict[int, int] = field(default_factory=dict)  # visual tokens


@dataclass(frozen=True)
class Answers:
    """One seed's questions, outcomes and the coverage of its prefills by kind of token."""

    posed: Sequence[Posed]
    outcomes: Mapping[Key, Outcome]
    coverage: Mapping[str, float]

    def asked(self, key: Key, part: Part = everything) -> list[int]:
        """Numbers of the questions of one part that `key` was asked."""
        return [number for number in self.outcomes[key].right if part(self.posed[number])]

    def asked_of_all(self) -> list[int]:
        """Numbers of the questions that no compressor was spared."""
        return [number for number in range(len(self.posed)) if all(number in o.right for o in self.outcomes.values())]

    def right(self, key: Key, numbers: Sequence[int]) -> list[bool]:
        """Answers to these questions."""
        return [self.outcomes[key].right[number] for number in numbers]


def answer_seed(paper: Paper, seed: int) -> Answers:
    """Ask everything; all experts are resident, so that answers alone differ."""
    count = paper.scale.questions
    posed = [Posed(kind, asked) for kind in SPECS for asked in read_questions(paper.scenes(seed, kind), count)]
    meter = _Coverage()
    outcomes: dict[Key, Outcome] = {}
    with Engine.load(EngineConfig(model=paper.model, device="cpu", threads=1, compute_dtype=DTYPE)) as engine:
        outcomes[VANILLA, 1.0] = _ask(engine, dict(enumerate(posed)), "uniform", 1.0, meter.raw)
        for method, ratio in ARMS:
            watch = meter.pruned if (method, ratio) == ("affinity", HALF) else None
            limit = count if (method, ratio) in MAIN else paper.scale.fewer_questions
            chosen = {number: one for number, one in enumerate(posed) if number % count < limit}
            outcomes[method, ratio] = _ask(engine, chosen, method, ratio, watch)
    return Answers(posed, outcomes, meter.means())


def _ask(engine: Engine, posed: Mapping[int, Posed], method: str, ratio: float, watch: _Watch | None) -> Outcome:
    outcome = Outcome()
    for number, asked in ((number, one.asked) for number, one in posed.items()):
        request = Request((asked.image,), asked.prompt, ANSWER_TOKENS, ratio, method)
        result = engine.generate(request) if watch is None else engine.watch(request, watch)
        outcome.right[number] = same(result.text, asked.answer)
        outcome.unique[number] = result.experts.distinct_in_prefill
        outcome.kept[number] = result.usage.kept_visual_tokens
    return outcome


class _Watch:
    """Notes, for each deeper layer of each prefill, the coverage of its text and of its visual tokens."""

    def __init__(self, visual: list[float], text: list[float] | None = None) -> None:
        self._visual, self._text = visual, text

    def __call__(self, session: Session, state: LayerState, chosen: Tensor, weights: Tensor) -> None:
        if session.step or session.in_prefix(state.layer):
            return
        is_visual = torch.zeros(len(chosen), dtype=torch.bool)
        is_visual[session.visual_rows(state.layer)] = True
        self._visual.append(covered(chosen[is_visual], session.spec.num_experts))
        if self._text is not None:
            self._text.append(covered(chosen[~is_visual], session.spec.num_experts))


class _Coverage:
    def __init__(self) -> None:
        self._found: dict[str, list[float]] = {"text": [], "raw visual": [], "pruned visual": []}
        self.raw = _Watch(self._found["raw visual"], self._found["text"])
        self.pruned = _Watch(self._found["pruned visual"])

    def means(self) -> dict[str, float]:
        return {name: statistics.fmean(values) for name, values in self._found.items()}


def covered(chosen: Tensor, experts: int) -> float:
    """Top-20 coverage of the choices (T, k) of T tokens."""
    return coverage(torch.bincount(chosen.flatten(), minlength=experts), TOP)
