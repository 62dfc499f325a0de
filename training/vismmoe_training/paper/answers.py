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
from vismmoe_training.paper.scale import ANSWER_TOKENS, ARMS, DTYPE, HALF, SPECS, Paper

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
    """What one compressor did with all questions at one keep ratio, in their order."""

    right: list[bool] = field(default_factory=list)  # exact match
    unique: list[float] = field(default_factory=list)  # distinct experts a deeper layer needs in the prefill
    kept: list[int] = field(default_factory=list)  # visual tokens


@dataclass(frozen=True)
class Answers:
    """One seed's questions, outcomes and the coverage of its prefills by kind of token."""

    posed: Sequence[Posed]
    outcomes: Mapping[Key, Outcome]
    coverage: Mapping[str, float]

    def right(self, key: Key, part: Part = everything) -> list[bool]:
        """Of the questions of one part."""
        return [right for posed, right in zip(self.posed, self.outcomes[key].right, strict=True) if part(posed)]


def answer_seed(paper: Paper, seed: int) -> Answers:
    """Ask everything; all experts are resident, so that answers alone differ."""
    count = paper.scale.questions
    posed = [Posed(kind, asked) for kind in SPECS for asked in read_questions(paper.scenes(seed, kind), count)]
    meter = _Coverage()
    outcomes: dict[Key, Outcome] = {}
    with Engine.load(EngineConfig(model=paper.model, device="cpu", threads=1, compute_dtype=DTYPE)) as engine:
        outcomes[VANILLA, 1.0] = _ask(engine, posed, "uniform", 1.0, meter.raw)
        for method, ratio in ARMS:
            watch = meter.pruned if (method, ratio) == ("affinity", HALF) else None
            outcomes[method, ratio] = _ask(engine, posed, method, ratio, watch)
    return Answers(posed, outcomes, meter.means())


def _ask(engine: Engine, posed: Sequence[Posed], method: str, ratio: float, watch: _Watch | None) -> Outcome:
    outcome = Outcome()
    for asked in (one.asked for one in posed):
        request = Request((asked.image,), asked.prompt, ANSWER_TOKENS, ratio, method)
        result = engine.generate(request) if watch is None else engine.watch(request, watch)
        outcome.right.append(same(result.text, asked.answer))
        outcome.unique.append(result.experts.distinct_in_prefill)
        outcome.kept.append(result.usage.kept_visual_tokens)
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
