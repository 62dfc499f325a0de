"""`make demo`: the main job from images to guided answers, on the reference model and the scenes that are shipped.

Each step prints the command that does the same. All that it writes goes to runs/demo. Every number in the tables at the
end was measured in this run.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from vismmoe.config import (
    DEFAULT_COMPRESSOR,
    REFERENCE_MODEL,
    CollectConfig,
    Config,
    EngineConfig,
    PlanConfig,
    TrainConfig,
    in_clone,
    resolve_model,
)
from vismmoe.errors import CorpusError
from vismmoe.failures import guarded, quieten
from vismmoe.schema import options
from vismmoe.sizes import format_size

if TYPE_CHECKING:
    from vismmoe.engine import Engine
    from vismmoe_training.arms import Arm, ArmResult
    from vismmoe_training.train import TrainSummary

CORPUS = "datasets/scenes"  # with a folder `train` and a folder `heldout`
NAME, ALIAS = "scenes-demo", "champion"
ANSWER_TOKENS = 12
COLLECT_KEEP_RATIO = 0.5  # routing is logged as the most compressed serving will see it


@dataclass(frozen=True)
class Scale:
    """How much is done."""

    images: int  # whose routing is logged
    questions: int  # held-out ones, asked of every arm
    epochs: int


FULL = Scale(images=160, questions=40, epochs=30)
REDUCED = Scale(images=24, questions=6, epochs=4)


@dataclass(frozen=True)
class Demo:
    """Where things lie."""

    model: str
    corpus: Path
    output: Path
    scale: Scale

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.output.absolute() / 'mlflow.db'}"

    @property
    def collected(self) -> CollectConfig:
        return CollectConfig(
            model=self.model,
            device="cpu",
            images=str(self.corpus / "train"),
            output=str(self.output / "traces"),
            limit=self.scale.images,
            keep_ratio=COLLECT_KEEP_RATIO,
            max_new_tokens=ANSWER_TOKENS,
        )

    @property
    def trained(self) -> TrainConfig:
        return TrainConfig(
            traces=(str(self.output / "traces"),),
            output=str(self.output / "artifact"),
            max_epochs=self.scale.epochs,
            register=NAME,
            alias=ALIAS,
            tracking_uri=self.tracking_uri,
        )


def main(words: Sequence[str] | None = None) -> int:
    """Exit status as for the commands."""
    given = _parser().parse_args(words)
    quieten()
    return guarded("demo", lambda: _main(given), given.debug)


def _main(given: argparse.Namespace) -> int:
    corpus = Path(given.corpus) if given.corpus else in_clone(CORPUS)
    if corpus is None or not (corpus / "train").is_dir() or not (corpus / "heldout").is_dir():
        raise CorpusError(f"The demo needs {corpus or CORPUS} with the folders train and heldout: run it from a clone.")
    resolve_model(given.model)
    print(run(Demo(given.model, corpus, Path(given.output), REDUCED if given.reduced else FULL)), flush=True)
    return 0


def run(demo: Demo) -> str:
    """Collect, train and register, answer; returns the tables."""
    from vismmoe_training.collect import collect
    from vismmoe_training.train import train

    started = time.monotonic()
    _clear(demo.output)
    _say(f"1/3  {as_command('collect', demo.collected)}")
    collected = collect(demo.collected)
    _say(str(collected), f"2/3  {as_command('train', demo.trained)}")
    trained = train(demo.trained)
    _say(trained.epochs)
    if trained.version is not None:
        _say(str(trained.version))
    budget = small_budget(demo)
    _say(f"3/3  {demo.scale.questions} held-out questions, each arm by a freshly loaded engine")
    results = answer(demo, budget)
    seconds = time.monotonic() - started
    corpus = (
        f"corpus: {collected.items} images of {demo.corpus / 'train'}, routing logged at {COLLECT_KEEP_RATIO:.0%} of "
        f"the visual tokens ({collected.rows} rows)\n"
        f"        {demo.scale.questions} questions on images of {demo.corpus / 'heldout'}"
    )
    return "\n\n".join((corpus, _recalls(trained), _answers(results, budget), f"{seconds:.0f} s in all"))


def small_budget(demo: Demo) -> int:
    """A quarter of the way from the least that runs to everything resident, in bytes."""
    from vismmoe.engine import plan_for

    plan = plan_for(PlanConfig(model=demo.model, device="cpu"))
    return plan.minimum_bytes + (plan.all_resident_bytes - plan.minimum_bytes) // 4


def answer(demo: Demo, budget: int) -> list[ArmResult]:
    """Every arm, the resident model first."""
    from vismmoe_training.arms import Arm, answer_all, read_questions

    arms = [
        Arm("vanilla, all experts resident", small=False),
        Arm("small budget, on demand"),
        Arm("small budget, predictor", predictor=True),
        Arm(f"  50 %, {DEFAULT_COMPRESSOR}, on demand", keep_ratio=0.5),
        Arm(f"  70 %, {DEFAULT_COMPRESSOR}, predictor", predictor=True, keep_ratio=0.7),
        Arm(f"  50 %, {DEFAULT_COMPRESSOR}, predictor", predictor=True, keep_ratio=0.5),
        Arm("  50 %, affinity, predictor", predictor=True, keep_ratio=0.5, compressor="affinity"),
        Arm("  70 %, random, predictor", predictor=True, keep_ratio=0.7, compressor="random"),
        Arm("  50 %, random, predictor", predictor=True, keep_ratio=0.5, compressor="random"),
    ]
    questions = read_questions(demo.corpus / "heldout", demo.scale.questions)
    return [answer_all(arm, loader(demo, arm, budget), questions, ANSWER_TOKENS) for arm in arms]


def loader(demo: Demo, arm: Arm, budget: int) -> Callable[[], Engine]:
    """How the engine of an arm is loaded: as `vismmoe infer` would."""
    from vismmoe_deploy import load_engine

    config = EngineConfig(
        model=demo.model, device="cpu", device_memory=budget if arm.small else None, prefetch=arm.predictor
    )
    predictor = f"models:/{NAME}@{ALIAS}" if arm.predictor else None
    return lambda: load_engine(config, predictor, demo.tracking_uri)


def as_command(name: str, config: Config) -> str:
    """The command line that makes this config."""
    flags = {option.name: option for option in options(type(config))}
    words = ["vismmoe", name]
    for field in fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            words += [flags[field.name].flag, *map(str, value if isinstance(value, tuple) else (value,))]
    return shlex.join(words)


def _recalls(trained: TrainSummary) -> str:
    from vismmoe_training.evaluate_predictors import recall_table

    shown = [recall for recall in trained.recalls if recall.k == 20]
    lines = [
        recall_table(shown, "decode"),
        "",
        recall_table(shown, "all"),
        *(f"not better: {shortfall}" for shortfall in trained.shortfalls),
    ]
    return "\n".join(lines)


def _answers(results: Sequence[ArmResult], budget: int) -> str:
    from vismmoe_training.arms import arms_table

    return (
        f"{arms_table(results)}\nsmall budget: {format_size(budget)} for the whole model on this CPU, experts on disk"
    )


def _clear(output: Path) -> None:
    """Forget what an earlier demo wrote; nothing else in the folder is touched."""
    for name in ("traces", "artifact", "artifact.training", "mlflow-artifacts"):
        shutil.rmtree(output / name, ignore_errors=True)
    (output / "mlflow.db").unlink(missing_ok=True)
    output.mkdir(parents=True, exist_ok=True)


def _say(*lines: str) -> None:
    print("\n".join(lines), file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vismmoe_training.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--reduced", action="store_true", help="a few images and questions only, as CI runs it")
    parser.add_argument("--model", default=REFERENCE_MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--corpus", metavar="DIR", help=f"folder with `train` and `heldout`; default: {CORPUS}")
    parser.add_argument("--output", default="runs/demo", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--debug", action="store_true", help="show the traceback when something fails")
    return parser


if __name__ == "__main__":
    sys.exit(main())
