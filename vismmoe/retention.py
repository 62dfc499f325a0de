"""The same questions answered with all visual tokens and with fewer: what is kept of the score, and what it saves.

Answers are written as they come, one JSON line each, so that a killed run goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vismmoe.config import DEFAULT_COMPRESSOR, EvalConfig
from vismmoe.engine import Engine, GenerationResult, Request
from vismmoe.errors import BudgetError, CorpusError, ImageError, UsageError
from vismmoe.evaluate.benchmarks import BENCHMARKS, prompts_of, scorer_of
from vismmoe.evaluate.bootstrap import retention_interval
from vismmoe.evaluate.forms import Item, chosen, load_items
from vismmoe.evaluate.report import numbers, sample_lines
from vismmoe.evaluate.score import Benchmark, PromptSet, Reading, Row, Scorer
from vismmoe.exclusive import only_writer
from vismmoe.untrusted import parse_json, read_json

Load = Callable[[], Engine]
Track = Callable[[Sequence[list[int]], int, str, str], Iterable[list[int]]]  # hands on and tells how far it is


@dataclass(frozen=True)
class Arm:
    """One way to answer."""

    compressor: str = DEFAULT_COMPRESSOR
    keep_ratio: float = 1.0

    @property
    def name(self) -> str:
        """As the report calls it."""
        return "vanilla" if self.keep_ratio == 1 else f"{self.compressor} {self.keep_ratio:.0%}".replace("%", " %")

    @property
    def file_name(self) -> str:
        """As its files are called."""
        return "vanilla" if self.keep_ratio == 1 else f"{self.compressor}-{self.keep_ratio:g}"


@dataclass(frozen=True)
class Answered:
    """What is kept of one answer."""

    place: int
    digest: str  # of the prompt: a folder of other questions is noticed
    text: str
    kept_visual_tokens: int
    distinct_experts: float
    ttft_ms: float
    bytes_loaded: int


@dataclass(frozen=True)
class Outcome:
    """All answers of one arm, in order; seconds: of the rows answered now, None if all were there."""

    arm: Arm
    answers: tuple[Answered, ...]
    rows_per_minute: float | None


def run(config: EvalConfig, load: Load, track: Track) -> dict[str, Any]:
    """Answer, score and compare; returns what `vismmoe eval --json` prints.

    Raises CorpusError, UsageError, and all that loading and running an engine raises.
    """
    assert config.data is not None
    benchmark = BENCHMARKS[config.benchmark]
    scorer = scorer_of(benchmark, config.scorer)
    prompts = prompts_of(benchmark, config.prompts or config.scorer)
    items = chosen(benchmark, load_items(benchmark, config.data, config.images), config.limit)
    asked = [prompts.text(item.row) for item in items]
    arms = arms_of(config)
    limit = config.max_new_tokens or benchmark.max_new_tokens[config.scorer]
    folder = None if config.output is None else Path(config.output)
    with only_writer(folder) if folder is not None else nullcontext(), load() as engine:
        family = engine.spec.family
        told = settings_of(config, engine.spec.fingerprint, prompts, limit, asked)
        if folder is not None:
            claim(folder, told)
        outcomes = [answer(engine, arm, items, asked, limit, config.batch_size, folder, track) for arm in arms]
    report = compare(benchmark, scorer, prompts, items, asked, outcomes, family, folder)
    report = {**told, **report}
    if folder is not None:
        _write(folder / "report.json", json.dumps(report, indent=1))
    return report


def arms_of(config: EvalConfig) -> list[Arm]:
    """Vanilla first, then each compressor with each share."""
    fewer = [Arm(name, ratio) for name in config.compressor for ratio in config.keep_ratio if ratio < 1]
    return [Arm(), *dict.fromkeys(fewer)]


# -- answering --------------------------------------------------------------------------------------------------------


def answer(
    engine: Engine,
    arm: Arm,
    items: Sequence[Item],
    asked: Sequence[str],
    max_new_tokens: int,
    batch_size: int,
    folder: Path | None,
    track: Track,
) -> Outcome:
    """What is written already is read back; the rest is answered, and written down after each batch."""
    file = None if folder is None else folder / f"{arm.file_name}.answers.jsonl"
    answers = {} if file is None else read_answers(file, asked)
    missing = [place for place in range(len(items)) if place not in answers]
    started = time.perf_counter()
    batches = [missing[start : start + batch_size] for start in range(0, len(missing), batch_size)]
    for places in track(batches, len(batches), arm.name, "batches"):
        requests = [_request(items[place], asked[place], arm, max_new_tokens) for place in places]
        results = together(engine, requests)
        fresh = [_answered(place, asked[place], told) for place, told in zip(places, results, strict=True)]
        if file is not None:
            _append(file, fresh)
        answers.update({each.place: each for each in fresh})
    minutes = (time.perf_counter() - started) / 60
    return Outcome(
        arm, tuple(answers[place] for place in range(len(items))), len(missing) / minutes if missing else None
    )


def together(engine: Engine, requests: Sequence[Request]) -> list[GenerationResult]:
    """As many at once as the budget holds: what does not fit together is halved."""
    try:
        return engine.generate_together(requests)
    except BudgetError:
        if len(requests) == 1:
            raise
    half = len(requests) // 2
    return together(engine, requests[:half]) + together(engine, requests[half:])


def _request(item: Item, prompt: str, arm: Arm, max_new_tokens: int) -> Request:
    try:
        images = () if item.image is None else (item.image(),)
    except (OSError, KeyError) as error:
        raise ImageError(f"{item.where}: the picture cannot be read ({error})") from None
    return Request(images, prompt, max_new_tokens, arm.keep_ratio, arm.compressor)


def _answered(place: int, prompt: str, told: GenerationResult) -> Answered:
    timing = told.timing_ms
    return Answered(
        place,
        _digest(prompt),
        told.text,
        told.usage.kept_visual_tokens,
        told.experts.distinct_in_prefill,
        timing.vision + timing.compress + timing.prefill,
        told.experts.prefill.bytes_loaded + told.experts.decode.bytes_loaded,
    )


# -- files ------------------------------------------------------------------------------------------------------------


def settings_of(
    config: EvalConfig, fingerprint: str, prompts: PromptSet, max_new_tokens: int, asked: Sequence[str]
) -> dict[str, Any]:
    """What must not change between the parts of one run."""
    return {
        "benchmark": config.benchmark,
        "prompts": prompts.name,
        "model": config.model,
        "model_fingerprint": fingerprint,
        "compute_dtype": config.compute_dtype,
        "salient_ratio": config.salient_ratio,
        "trade_off": config.trade_off,
        "max_new_tokens": max_new_tokens,
        "rows": len(asked),
        "questions_digest": _digest("\n".join(asked)),
    }


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder this run's, or see that it is. UsageError names what differs from the run that it holds."""
    file = folder / "run.json"
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        _write(file, json.dumps(settings, indent=1))
        return
    try:
        found = read_json(file)
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        raise CorpusError(f"{file} is damaged: give another --output.") from None
    for name, value in settings.items():
        if found.get(name) != value:
            raise UsageError(
                f"{folder} holds a run with {name} {found.get(name)!r}, this one has {value!r}: give another --output."
            )


def read_answers(file: Path, asked: Sequence[str]) -> dict[int, Answered]:
    """By place. A last line that was cut off by a crash is taken away, and its question asked again."""
    if not file.exists():
        return {}
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(file, len(whole))
    found = {}
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            told = Answered(**parse_json(line))
            if not isinstance(told.place, int):
                raise TypeError
        except (ValueError, TypeError):
            raise CorpusError(f"{file}, line {number} is damaged: take the file away to answer anew.") from None
        if not 0 <= told.place < len(asked) or told.digest != _digest(asked[told.place]):
            raise UsageError(f"{file}, line {number} answers another question: give another --output.")
        found[told.place] = told
    return found


def _append(file: Path, answers: Sequence[Answered]) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(asdict(each)) + "\n" for each in answers)
        stream.flush()
        os.fsync(stream.fileno())


def _write(file: Path, text: str) -> None:
    """The file appears whole or not at all."""
    draft = file.with_name(f".{file.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(
    benchmark: Benchmark,
    scorer: Scorer,
    prompts: PromptSet,
    items: Sequence[Item],
    asked: Sequence[str],
    outcomes: Sequence[Outcome],
    family: str,
    folder: Path | None,
) -> dict[str, Any]:
    """Scores of all arms; the first is what the others are compared with."""
    arms = []
    first: list[Reading] = []
    for outcome in outcomes:
        rows = predictions(items, outcome, scorer, family)
        score, readings = scorer(rows)
        first = first or readings
        arms.append(_told(outcome, {**numbers(score)}, _retention(scorer, first, readings)))
        if folder is not None:
            lines = sample_lines(rows, asked, readings)
            text = "".join(json.dumps(line, default=str) + "\n" for line in lines)
            _write(folder / f"{outcome.arm.file_name}.samples.jsonl", text)
    return {"scorer": scorer.name, "scorer_source": scorer.source, "arms": arms}


def predictions(items: Sequence[Item], outcome: Outcome, scorer: Scorer, family: str) -> list[Row]:
    """The rows with their answers, as the scorer's own wrapper of this model family would hand them over."""
    strip = scorer.name == "vlmevalkit" and family.startswith("deepseek_vl")  # its class takes full stops away
    texts = [each.text.rstrip(".") if strip else each.text for each in outcome.answers]
    return [{**item.row, "prediction": text} for item, text in zip(items, texts, strict=True)]


def _retention(
    scorer: Scorer, first: Sequence[Reading], readings: Sequence[Reading]
) -> tuple[float, list[float] | None] | None:
    if first is readings:
        return None
    before, after = scorer.total(first).value, scorer.total(readings).value
    if not before or after is None:
        return None
    interval = retention_interval(scorer, first, readings)
    return after / before, None if interval is None else [interval.low, interval.high]


def _told(outcome: Outcome, told: dict[str, Any], retention: tuple[float, list[float] | None] | None) -> dict[str, Any]:
    answers = outcome.answers
    return {
        "name": outcome.arm.name,
        "compressor": None if outcome.arm.keep_ratio == 1 else outcome.arm.compressor,
        "keep_ratio": outcome.arm.keep_ratio,
        **told,
        "retention": None if retention is None else retention[0],
        "interval": None if retention is None else retention[1],
        "kept_visual_tokens": statistics.fmean(each.kept_visual_tokens for each in answers),
        "distinct_experts": statistics.fmean(each.distinct_experts for each in answers),
        "ttft_ms": statistics.median(each.ttft_ms for each in answers),
        "bytes_loaded": sum(each.bytes_loaded for each in answers),
        "rows_per_minute": outcome.rows_per_minute,
    }
