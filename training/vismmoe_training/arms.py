"""The same questions answered in several ways, side by side: what each way costs and what it gets right."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vismmoe.config import DEFAULT_COMPRESSOR
from vismmoe.engine import Engine, GenerationResult, Request
from vismmoe.errors import CorpusError
from vismmoe.metrics import PhaseCounters
from vismmoe.talk import table
from vismmoe_training.corpus import METADATA
from vismmoe_training.progress import track

LEGEND = """\
exact: exact match with the right answer; alike: same answer as in the first line; tokens: visual tokens kept
prefill, decode: needed experts that were found in the cache; used: prefetched experts that were then needed
MiB read, stall and time: mean of a question"""


@dataclass(frozen=True)
class Asked:
    """One question with its one right answer."""

    image: Path
    style: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Arm:
    """One way to answer."""

    name: str
    small: bool = True  # under the small budget, or with every expert resident
    predictor: bool = False
    keep_ratio: float = 1.0
    compressor: str = DEFAULT_COMPRESSOR


@dataclass(frozen=True)
class ArmResult:
    """What one arm did with all questions."""

    arm: Arm
    answers: tuple[str, ...]
    correct: int
    prefill: PhaseCounters
    decode: PhaseCounters
    kept_tokens: int
    total_ms: float


def read_questions(folder: Path, count: int) -> list[Asked]:
    """`count` questions over the images of a corpus, the styles in turn. CorpusError when there are none."""
    found = sorted(folder.rglob(METADATA))
    lines = [(file.parent, json.loads(line)) for file in found for line in file.read_text("utf-8").splitlines()]
    if not lines:
        raise CorpusError(f"{folder} holds no {METADATA} with questions.")
    asked = []
    for turn in range(count):
        through, image = divmod(turn, len(lines))
        place, told = lines[image]
        # The image's number is added, or all images would be asked in the same style.
        question = told["questions"][(image + through) % len(told["questions"])]
        asked.append(Asked(place / told["file_name"], question["style"], question["prompt"], question["answer"]))
    return asked


def answer_all(arm: Arm, load: Callable[[], Engine], questions: Sequence[Asked], tokens: int) -> ArmResult:
    """Ask everything of a freshly loaded engine, so that no arm profits from what another one left in the cache."""
    results: list[GenerationResult] = []
    with load() as engine:
        for asked in track(questions, len(questions), arm.name, "questions"):
            request = Request((asked.image,), asked.prompt, tokens, arm.keep_ratio, arm.compressor)
            results.append(engine.generate(request))
    return ArmResult(
        arm=arm,
        answers=tuple(result.text for result in results),
        correct=sum(same(result.text, asked.answer) for result, asked in zip(results, questions, strict=True)),
        prefill=sum((result.experts.prefill for result in results), PhaseCounters()),
        decode=sum((result.experts.decode for result in results), PhaseCounters()),
        kept_tokens=sum(result.usage.kept_visual_tokens for result in results),
        total_ms=sum(result.timing_ms.total for result in results),
    )


def same(answer: str, right: str) -> bool:
    """Exact match, but for case, surrounding space and a final full stop."""
    return answer.strip().rstrip(".").casefold() == right.strip().rstrip(".").casefold()


def arms_table(results: Sequence[ArmResult]) -> str:
    """One line an arm; the first one is what the others are compared with."""
    head = ("answers", "exact", "alike", "tokens", "prefill", "decode", "used", "MiB", "stall ms", "ms")
    return "\n".join((table([_row(result, results[0]) for result in results], head), LEGEND))


def _row(result: ArmResult, first: ArmResult) -> tuple[str, ...]:
    asked = len(result.answers)
    alike = sum(one == other for one, other in zip(result.answers, first.answers, strict=True))
    both = result.prefill + result.decode
    return (
        result.arm.name,
        f"{result.correct / asked:.0%}",
        f"{alike / asked:.0%}",
        f"{result.kept_tokens / asked:.0f}",
        _hits(result.prefill),
        _hits(result.decode),
        f"{both.prefetched_used / both.prefetched:.0%}" if both.prefetched else "-",
        f"{both.bytes_loaded / asked / 2**20:.2f}",
        f"{both.stall_ms / asked:.1f}",
        f"{result.total_ms / asked:.0f}",
    )


def _hits(phase: PhaseCounters) -> str:
    """No hit rate is claimed where no expert outside the pinned layers was needed."""
    return f"{phase.hit_rate:.0%}" if phase.accesses else "-"
