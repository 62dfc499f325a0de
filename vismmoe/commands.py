"""What each command does once its config is read: call one function, print what it returns.

Each function takes its config and the stream for results. Heavy rooms are imported inside, so that nothing is loaded
for a command that is not run. Training and deployment are reached from here only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vismmoe.config import (
    BenchConfig,
    CollectConfig,
    EvalConfig,
    InferConfig,
    PlanConfig,
    RegisterConfig,
    ReportConfig,
    SimulateConfig,
    TrainConfig,
    TuneConfig,
)
from vismmoe.talk import infer_report, plan_report

if TYPE_CHECKING:
    from vismmoe.predictors import LookaheadPredictor
    from vismmoe.request import Message, Request
    from vismmoe.types import ModelSpec


def plan(config: PlanConfig, results: IO[str]) -> None:
    """Arithmetic only: headers are read, no weight is."""
    from vismmoe.engine import plan_for

    report = plan_for(config).to_json()
    print(json.dumps(report) if config.json else plan_report(report), file=results)


def infer(config: InferConfig, results: IO[str]) -> None:
    """Bad images are told of before the model is loaded; a loading error is told of before anything is answered."""
    requests = _asked(config)
    from vismmoe_deploy import load_engine

    def stream(text: str) -> None:
        print(text, end="", file=results, flush=True)

    reports: list[dict[str, Any]] = []
    only = requests[0] if len(requests) == 1 else None
    with load_engine(config, config.predictor, request=only) as engine:
        ask = engine.generate if len(requests) == 1 else engine.converse().ask
        for request in requests:
            report = ask(request, stream if config.stream else None).to_json()
            reports.append(report)
            if not config.json:
                print("" if config.stream else report["text"], file=results, flush=True)
                print(infer_report(report), file=sys.stderr)
    if config.json:
        turns = {"turns": reports} if len(reports) > 1 else {}
        print(json.dumps({**reports[-1], **turns}), file=results)


def _asked(config: InferConfig) -> list[Request]:
    """One request for each answer, its images read."""
    from vismmoe.images import ENOUGH_PIXELS, load_images

    enough = max(ENOUGH_PIXELS, config.max_pixels or 0)
    images: tuple[Any, ...] = ()
    turns: list[tuple[Message, ...]] = [()]
    if config.messages is None:
        images = load_images(config.image, enough)
    else:
        from vismmoe.messages import read_turns, with_images

        turns = [with_images(turn, enough) for turn in read_turns(Path(config.messages))]
    from vismmoe.engine import Request

    return [
        Request(
            images=images,
            prompt=config.prompt or "",
            max_new_tokens=config.max_new_tokens,
            keep_ratio=config.keep_ratio,
            compressor=config.compressor,
            sampling=config.sampling(),
            prefill_chunk=config.prefill_chunk,
            history=turn,
        )
        for turn in turns
    ]


def evaluate(config: EvalConfig, results: IO[str]) -> None:
    """Either answers that exist are scored, or a model answers in each of the asked ways."""
    from vismmoe.evaluate.benchmarks import BENCHMARKS, scorer_of
    from vismmoe.evaluate.predictions import read_predictions
    from vismmoe.evaluate.report import score_json, score_report

    benchmark = BENCHMARKS[config.benchmark]
    if config.predictions is not None:
        scorer = scorer_of(benchmark, config.scorer)
        told = score_json(benchmark, scorer, config.prompts, read_predictions(benchmark, config.predictions))
        print(json.dumps(told) if config.json else score_report(told), file=results)
        return
    from vismmoe.evaluate.report import retention_report
    from vismmoe.retention import run
    from vismmoe_deploy import load_engine
    from vismmoe_training.progress import track

    told = run(config, lambda: load_engine(config.engine_config(), config.predictor, config.tracking_uri), track)
    print(json.dumps(told) if config.json else retention_report(told), file=results)


def bench(config: BenchConfig, results: IO[str]) -> None:
    from vismmoe.bench.command import bench as run
    from vismmoe.bench.command import bench_report

    report = run(config)
    print(json.dumps(report) if config.json else bench_report(report), file=results)


def collect(config: CollectConfig, results: IO[str]) -> None:
    from vismmoe_training.collect import collect as run

    print(run(config), file=results)


def train(config: TrainConfig, results: IO[str]) -> None:
    from vismmoe_training.train import train as run

    print(run(config), file=results)


def tune(config: TuneConfig, results: IO[str]) -> None:
    from vismmoe_training.tune import tune as run

    print(run(config), file=results)


def register(config: RegisterConfig, results: IO[str]) -> None:
    from vismmoe_training.registry import register as run

    print(run(config.artifact, config.name, config.alias, config.tracking_uri), file=results)


def simulate(config: SimulateConfig, results: IO[str]) -> None:
    from vismmoe.simulate.comparison import compare_rules, simulation_json, simulation_report

    if config.measure_profile is not None:
        from vismmoe.simulate.measure import measure_profile

        print(measure_profile(config.model, Path(config.measure_profile)), file=results)
        return
    found = compare_rules(config, lambda source, spec: _learned(source, spec, config.tracking_uri))
    print(json.dumps(simulation_json(found)) if config.json else simulation_report(found), file=results)


def report(config: ReportConfig, results: IO[str]) -> None:
    from vismmoe_training.report.make import make_report

    print(make_report(config), file=results)


def _learned(source: str, spec: ModelSpec, tracking_uri: str | None) -> LookaheadPredictor:
    """The predictor that a folder or a registered model holds, made for the logged model."""
    from vismmoe.predictors import build_predictor
    from vismmoe_deploy import resolve

    return build_predictor(resolve(source, tracking_uri, spec).artifact)
