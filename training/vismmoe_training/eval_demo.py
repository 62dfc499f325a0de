"""`make eval-demo`: four scene benchmarks with all visual tokens, with 70 % and with 50 %, by four compressors.

The scenes are drawn anew (held out by their seed), written in the shapes of four benchmarks and read back as those are;
each table is what the command above it prints. A run that is cut off goes on when it is started again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vismmoe.config import DEFAULT_COMPRESSOR, REFERENCE_MODEL, CompressorName, EvalConfig, resolve_model
from vismmoe.failures import guarded, quieten
from vismmoe_training.scenes.benchmarks import SHAPES, Sizes, write_benchmarks

COMPRESSORS: tuple[CompressorName, ...] = (DEFAULT_COMPRESSOR, "affinity", "saliency", "random")
KEEP_RATIOS = (0.7, 0.5)
ANSWER_TOKENS = 16
FULL = Sizes(mme=18, mmbench=9, pope=6, ocrbench=36)
REDUCED = Sizes(mme=2, mmbench=1, pope=1, ocrbench=3)


@dataclass(frozen=True)
class EvalDemo:
    """Where things lie."""

    model: str
    output: Path
    sizes: Sizes
    scorer: str

    def config(self, shape: str, data: Path) -> EvalConfig:
        """What `vismmoe eval` is called with."""
        return EvalConfig(
            model=self.model,
            device="cpu",
            benchmark=shape,  # type: ignore[arg-type]
            scorer=self.scorer,  # type: ignore[arg-type]
            prompts="plain",  # the reference model knows no harness's additions to a question
            data=str(data),
            compressor=COMPRESSORS,
            keep_ratio=KEEP_RATIOS,
            max_new_tokens=ANSWER_TOKENS,
            output=str(self.output / shape),
        )


def main(words: Sequence[str] | None = None) -> int:
    """Exit status as for the commands."""
    given = _parser().parse_args(words)
    quieten()
    return guarded("eval-demo", lambda: _main(given), given.debug)


def _main(given: argparse.Namespace) -> int:
    resolve_model(given.model)
    output = Path(given.output) / ("reduced" if given.reduced else "full")
    if given.anew:
        shutil.rmtree(output, ignore_errors=True)
    run(EvalDemo(given.model, output, REDUCED if given.reduced else FULL, given.scorer))
    return 0


def run(demo: EvalDemo) -> None:
    """Print the four tables, each as soon as it is there."""
    from vismmoe.evaluate.report import retention_report
    from vismmoe.retention import run as evaluate
    from vismmoe_deploy import load_engine
    from vismmoe_training.demo import as_command
    from vismmoe_training.progress import track

    started = time.monotonic()
    places = write_benchmarks(demo.output / "data", demo.sizes)
    for shape in SHAPES:
        config = demo.config(shape, places[shape])
        print(as_command("eval", config), file=sys.stderr, flush=True)
        told = evaluate(config, lambda config=config: load_engine(config.engine_config()), track)  # type: ignore[misc]
        print(f"scenes in the shape of {retention_report(told)}\n", flush=True)
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vismmoe_training.eval_demo", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--reduced", action="store_true", help="a few questions only, as CI runs it")
    parser.add_argument("--anew", action="store_true", help="forget the answers of an earlier run")
    parser.add_argument("--scorer", default="lmms-eval", choices=["lmms-eval", "vlmevalkit", "official"])
    parser.add_argument("--model", default=REFERENCE_MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--output", default="runs/eval-demo", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--debug", action="store_true", help="show the traceback when something fails")
    return parser


if __name__ == "__main__":
    sys.exit(main())
