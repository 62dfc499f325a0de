"""The published accuracy and coverage tables: every compressor at every keep ratio answers the same questions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vismmoe.config import EngineConfig
from vismmoe.engine import Engine, Request
from vismmoe.metrics import coverage
from vismmoe.session import Session
from vismmoe.types import LayerState
from vismmoe_training.arms import Asked, read_questions, same
from vismmoe_training.paper.scale import ANSWER_TOKENS, ARMS, DTYPE, SPECS, Paper

VANILLA = "vanilla"
TOP = 20  # experts whose share of the routed tokens is the coverage
Key = tuple[str, float]  # compressor, keep ratio


@dataclass
class Outcome:
    """What one compressor did with all questions at one keep ratio."""

    right: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))  # by kind of scene
    by_style: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    unique: list[float] = field(default_factory=list)  # distinct experts a deeper layer needs in the prefill
    kept: list[int] = field(default_factory=list)  # visual tokens

    def accuracy(self, kind: str | None = None) -> float:
        """Share of exact matches, of one kind of scene or of all."""
        return statistics.fmean([r for name, right in self.right.items() if kind in (None, name) for r in right])


@dataclass(frozen=True)
class Answers:
    """One seed's outcomes and the coverage of its prefills by kind of token."""

    outcomes: Mapping[Key, Outcome]
    coverage: Mapping[str, float]


def answer_seed(paper: Paper, seed: int) -> Answers:
    """Ask everything; all experts are resident, so that answers alone differ."""
    questions = {
        kind: read_questions(paper.scenes(seed, kind), -(-paper.scale.questions // len(SPECS))) for kind in SPECS
    }
    meter = _Coverage()
    outcomes: dict[Key, Outcome] = {}
    with Engine.load(EngineConfig(model=paper.model, device="cpu", threads=1, compute_dtype=DTYPE)) as engine:
        outcomes[VANILLA, 1.0] = _ask(engine, questions, "uniform", 1.0, meter.raw)
        for method, ratio in ARMS:
            watch = meter.pruned if (method, ratio) == ("affinity", 0.5) else None
            outcomes[method, ratio] = _ask(engine, questions, method, ratio, watch)
    return Answers(outcomes, meter.means())


def _ask(
    engine: Engine, questions: Mapping[str, Sequence[Asked]], method: str, ratio: float, watch: _Watch | None
) -> Outcome:
    outcome = Outcome()
    for kind, asked in questions.items():
        for one in asked:
            request = Request((one.image,), one.prompt, ANSWER_TOKENS, ratio, method)
            result = engine.generate(request) if watch is None else engine.watch(request, watch)
            right = same(result.text, one.answer)
            outcome.right[kind].append(right)
            outcome.by_style[one.style].append(right)
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
