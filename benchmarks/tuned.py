"""Tuned settings against the published constants: stall, simulated and measured, and answers, on freshly drawn scenes.

    python benchmarks/tuned.py [--tuned configs/tuned/reference.yaml] [--draws 3] [--questions 12] [--json FILE]

Both get a predictor of their own, trained on logs with their own choice of tokens. Then both answer the same questions
under the demo's small budget, turn by turn, with reads slowed to a known rate (the page cache would answer a read of
24 KB at once); the simulator replays the same routing at that rate with as many slabs. Every draw is of other scenes of
all kinds. Exit status 1 when the tuned settings do not stall less in both, over all draws.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
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
from vismmoe.trace import read_traces
from vismmoe_training.arms import Asked, read_questions
from vismmoe_training.collect import collect
from vismmoe_training.data import LookaheadData
from vismmoe_training.fitting import FitSettings, fit
from vismmoe_training.paper.ablation import load_guided, small_budget
from vismmoe_training.row_table import RowTable
from vismmoe_training.scenes.corpus import write_corpus
from vismmoe_training.scenes.mixes import MIXES
from vismmoe_training.train import predictor_config
from vismmoe_training.tune_objective import answer

ANSWER_TOKENS, SEED = 12, 81_001
TOKENS = ("compressor", "keep_ratio", "salient_ratio", "trade_off")
# lambda 2, half of the tokens, W 5, gamma 0.8; alpha is not published, ours is 0.2
CONSTANTS = {"compressor": "affinity", "keep_ratio": 0.5, "salient_ratio": 0.2, "trade_off": 2.0}
COLUMNS = {
    "accuracy": "answers right",
    "simulated_ms": "stall ms simulated",
    "measured_ms": "measured",
    "mebibytes": "MiB",
}


@dataclass(frozen=True)
class Side:
    """One of the two: its settings and its predictor."""

    name: str
    engine: EngineConfig
    net: LookaheadNet


@dataclass(frozen=True)
class Draw:
    """What came of one side and one draw of questions; means of a question."""

    accuracy: float
    simulated_ms: float
    measured_ms: float
    mebibytes: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", default="configs/tuned/reference.yaml")
    parser.add_argument("--model", default=REFERENCE_MODEL)
    parser.add_argument("--images", type=int, default=120, help="training scenes whose routing is logged for each side")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--questions", type=int, default=12, help="of each draw")
    parser.add_argument("--disk-rate", type=parse_size, default="20MB")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vismmoe-tuned-") as work:
        learning = read_yaml(given.tuned, TrainConfig)
        sides = (
            prepare("published constants", CONSTANTS, {}, given, Path(work) / "published"),
            prepare("tuned", tokens_of(given.tuned), learning, given, Path(work) / "tuned"),
        )
        found: dict[str, list[Draw]] = {side.name: [] for side in sides}
        for number in range(given.draws):
            questions = draw_questions(Path(work) / f"scenes-{number}", given.questions, SEED + 10 * number)
            for side in sides:  # turn by turn, so that the machine's unrest meets both alike
                found[side.name].append(measure(side, questions, given.disk_rate))
    means = {
        name: [statistics.fmean(getattr(d, key) for d in draws) for key in COLUMNS] for name, draws in found.items()
    }
    rows = [(name, number, *cells(vars(d).values())) for name, draws in found.items() for number, d in enumerate(draws)]
    rows += [(name, "mean", *cells(values)) for name, values in means.items()]
    print(table(rows, ("settings", "draw", *COLUMNS.values())))
    print(f"draws of {given.questions} questions, reads at {given.disk_rate / 1e6:.0f} MB/s")
    if given.json:
        told = {name: [vars(draw) for draw in draws] for name, draws in found.items()}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    constants, tuned = (dict(zip(COLUMNS, values, strict=True)) for values in means.values())
    return int(any(tuned[key] >= constants[key] for key in ("simulated_ms", "measured_ms")))


def cells(values: Iterable[float]) -> tuple[str, ...]:
    accuracy, *others = values
    return (f"{accuracy:.1%}", *(f"{value:.2f}" for value in others))


def draw_questions(folder: Path, count: int, seed: int) -> list[Asked]:
    """Questions on newly drawn scenes of all kinds in turn."""
    each = -(-count // len(MIXES))
    for number, (kind, spec) in enumerate(MIXES.items()):
        write_corpus(folder / kind, each, seed + number, spec)
    found = [read_questions(folder / kind, each) for kind in MIXES]
    return [asked for turn in zip(*found, strict=True) for asked in turn][:count]


def tokens_of(file: str) -> dict[str, object]:
    return {name: value for name, value in read_yaml(file, InferConfig).items() if name in TOKENS}


def prepare(
    name: str, tokens: dict[str, object], learning: dict[str, object], given: argparse.Namespace, work: Path
) -> Side:
    """Log the training scenes' routing and learn."""
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
    return Side(name, EngineConfig(**shared), net)  # type: ignore[arg-type]


def measure(side: Side, questions: Sequence[Asked], disk_rate: int) -> Draw:
    """Ask under the small budget, then replay the same routing."""
    answered = answer(side.engine, questions)
    budget = small_budget(side.engine.model, "auto")
    config = replace(side.engine, device_memory=budget, disk_rate=disk_rate)
    with load_guided(config, side.net) as engine:
        plan, size = engine.plan, engine.checkpoint.layout.expert_bytes
        asked = [Request((q.image,), q.prompt, ANSWER_TOKENS, config.keep_ratio, config.compressor) for q in questions]
        both = [phase for r in map(engine.generate, asked) for phase in (r.experts.prefill, r.experts.decode)]
    profile = replace(read_profile(DEFAULT_PROFILE), disk_rate=disk_rate)
    setting = Setting.of(
        answered.traces, profile, slots=plan.slabs, pinned_layers=plan.pinned_layers, expert_bytes=size
    )
    foresight = LearnedForesight(LookaheadPredictor(side.net, answered.traces.header.spec))
    return Draw(
        accuracy=answered.accuracy,
        simulated_ms=simulate(setting, foresight=foresight).stall_ms / len(questions),
        measured_ms=sum(phase.stall_ms for phase in both) / len(questions),
        mebibytes=sum(phase.bytes_loaded for phase in both) / len(questions) / 2**20,
    )


if __name__ == "__main__":
    sys.exit(main())
