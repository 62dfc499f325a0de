"""Tuned settings against the published constants: stall, simulated and measured, and answers, on freshly drawn scenes.

    python benchmarks/tuned.py [--tuned configs/tuned/reference.yaml] [--questions 24] [--disk-rate 20MB] [--json FILE]

Both get a predictor of their own, trained on logs with their own choice of tokens. Then both answer the same questions
under the demo's small budget, turn by turn, with reads slowed to a known rate (the page cache would answer a read of
24 KB at once); the simulator replays the same routing at that rate with as many slabs. Exit status 1 when the tuned
settings do not stall less in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vismmoe.config import REFERENCE_MODEL, CollectConfig, EngineConfig, InferConfig, TrainConfig, in_clone
from vismmoe.engine import Request
from vismmoe.errors import CorpusError
from vismmoe.predictors import LookaheadNet, LookaheadPredictor
from vismmoe.settings import read_yaml
from vismmoe.simulate.foresight import LearnedForesight
from vismmoe.simulate.profile import DEFAULT_PROFILE, read_profile
from vismmoe.simulate.replay import Setting, simulate
from vismmoe.sizes import parse_size
from vismmoe.talk import table
from vismmoe.trace import TraceSet, read_traces
from vismmoe_training.arms import Asked, read_questions
from vismmoe_training.collect import collect
from vismmoe_training.data import LookaheadData
from vismmoe_training.fitting import FitSettings, fit
from vismmoe_training.paper.ablation import load_guided, small_budget
from vismmoe_training.row_table import RowTable
from vismmoe_training.scenes.corpus import write_corpus
from vismmoe_training.train import predictor_config
from vismmoe_training.tune_objective import answer

ANSWER_TOKENS, ROUNDS, SEED = 12, 3, 81_001
TOKENS = ("compressor", "keep_ratio", "salient_ratio", "trade_off")
# lambda 2, half of the tokens, W 5, gamma 0.8; alpha is not published, ours is 0.2
CONSTANTS = {"compressor": "affinity", "keep_ratio": 0.5, "salient_ratio": 0.2, "trade_off": 2.0}


@dataclass
class Side:
    """One of the two: its settings, its predictor, what came of it."""

    name: str
    engine: EngineConfig
    train: TrainConfig
    net: LookaheadNet
    accuracy: float
    traces: TraceSet
    simulated_ms: float = 0.0  # of a request, as are the others
    measured_ms: float = 0.0
    mebibytes: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", default="configs/tuned/reference.yaml")
    parser.add_argument("--model", default=REFERENCE_MODEL)
    parser.add_argument("--images", type=int, default=120, help="training scenes whose routing is logged for each side")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--disk-rate", type=parse_size, default="20MB")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vismmoe-tuned-") as work:
        scenes = write_corpus(Path(work) / "scenes", given.questions, SEED)
        questions = read_questions(scenes, given.questions)
        learning = read_yaml(given.tuned, TrainConfig)
        sides = [
            prepare("published constants", CONSTANTS, {}, given, Path(work) / "published", questions),
            prepare("tuned", tokens_of(given.tuned), learning, given, Path(work) / "tuned", questions),
        ]
        measure(sides, questions, given.disk_rate)
    rows = [
        (s.name, f"{s.accuracy:.1%}", f"{s.simulated_ms:.2f}", f"{s.measured_ms:.2f}", f"{s.mebibytes:.2f}")
        for s in sides
    ]
    print(table(rows, ("settings", "answers right", "stall ms simulated", "measured", "MiB read")))
    print(f"means of {given.questions} questions, median of {ROUNDS} rounds, reads at {given.disk_rate / 1e6:.0f} MB/s")
    if given.json:
        told = {
            s.name: {k: getattr(s, k) for k in ("accuracy", "simulated_ms", "measured_ms", "mebibytes")} for s in sides
        }
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    constants, tuned = sides
    return int(tuned.simulated_ms >= constants.simulated_ms or tuned.measured_ms >= constants.measured_ms)


def tokens_of(file: str) -> dict[str, object]:
    return {name: value for name, value in read_yaml(file, InferConfig).items() if name in TOKENS}


def prepare(
    name: str,
    tokens: dict[str, object],
    learning: dict[str, object],
    given: argparse.Namespace,
    work: Path,
    questions: Sequence[Asked],
) -> Side:
    """Log the training scenes' routing, learn, answer."""
    corpus = in_clone("datasets/scenes/train")
    if corpus is None:
        raise CorpusError("datasets/scenes/train is not here: run this from a clone of the project.")
    logs = work / "logs"
    shared = {"model": given.model, "device": "cpu", "threads": 1, **tokens}
    collect(
        CollectConfig(images=str(corpus), output=str(logs), limit=given.images, max_new_tokens=ANSWER_TOKENS, **shared)  # type: ignore[arg-type]
    )
    train = TrainConfig(traces=(str(logs),), output=str(work / "artifact"), **learning)  # type: ignore[arg-type]
    data = LookaheadData(
        RowTable(read_traces([logs]), train.window),
        train.batch_size,
        train.val_fraction,
        train.test_fraction,
        train.seed,
    )
    settings = FitSettings(train.max_epochs, train.patience, train.learning_rate, train.weight_decay, train.seed)
    net = fit(predictor_config(train), settings, data, state=work / "state").net
    engine = EngineConfig(**shared)  # type: ignore[arg-type]
    answered = answer(engine, questions)
    return Side(name, engine, train, net, answered.accuracy, answered.traces)


def measure(sides: Sequence[Side], questions: Sequence[Asked], disk_rate: int) -> None:
    """Fill in the stalls: turn by turn, so that the machine's unrest meets both alike."""
    budget = small_budget(sides[0].engine.model, "auto")
    rounds: dict[str, list[float]] = {side.name: [] for side in sides}
    for _ in range(ROUNDS):
        for side in sides:
            config = replace(side.engine, device_memory=budget, disk_rate=disk_rate)
            with load_guided(config, side.net) as engine:
                slabs, pinned, size = (
                    engine.plan.slabs,
                    engine.plan.pinned_layers,
                    engine.checkpoint.layout.expert_bytes,
                )
                results = [
                    engine.generate(Request((q.image,), q.prompt, ANSWER_TOKENS, config.keep_ratio, config.compressor))
                    for q in questions
                ]
            both = [phase for r in results for phase in (r.experts.prefill, r.experts.decode)]
            rounds[side.name].append(sum(phase.stall_ms for phase in both) / len(questions))
            side.mebibytes = sum(phase.bytes_loaded for phase in both) / len(questions) / 2**20
            profile = replace(read_profile(DEFAULT_PROFILE), disk_rate=disk_rate)
            setting = Setting.of(side.traces, profile, slots=slabs, pinned_layers=pinned, expert_bytes=size)
            foresight = LearnedForesight(LookaheadPredictor(side.net, side.traces.header.spec))
            side.simulated_ms = simulate(setting, foresight=foresight).stall_ms / len(questions)
    for side in sides:
        side.measured_ms = statistics.median(rounds[side.name])


if __name__ == "__main__":
    sys.exit(main())
