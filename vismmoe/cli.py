"""The command line: parses, calls one function per command, turns errors into a sentence and an exit status.

Results go to stdout, everything else to stderr. Nothing here imports torch before a command runs, so `--help` is
instant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import IO, TYPE_CHECKING, Any

from vismmoe.errors import UsageError
from vismmoe.failures import guarded, prepare_streams, quieten
from vismmoe.schema import Command, did_you_mean

if TYPE_CHECKING:
    from vismmoe.config import Config

Run = Callable[[Any, IO[str]], None]  # (config, where results go)


COMMANDS = {
    "plan": Command(
        "say what goes where in memory, in bytes, before anything is loaded", "PlanConfig", "plan",
        example="vismmoe plan --device-memory 34MiB",
    ),
    "collect": Command(
        "run the model over a corpus and log its routing", "CollectConfig", "collect",
        example="vismmoe collect --images datasets/scenes/train --keep-ratio 0.5 --output runs/traces",
    ),
    "train": Command(
        "train a lookahead predictor on routing logs", "TrainConfig", "train",
        example="vismmoe train --traces runs/traces --output runs/artifact --register scenes --alias champion",
    ),
    "tune": Command(
        "search for the predictor's best settings", "TuneConfig", "tune",
        example="vismmoe tune --traces runs/traces --trials 10 --output runs/best.yaml",
    ),
    "register": Command(
        "put an artifact into the model registry", "RegisterConfig", "register", "artifact",
        example="vismmoe register runs/artifact --name scenes --alias champion",
    ),
    "infer": Command(
        "answer a question about images, experts streamed through a small cache", "InferConfig", "infer",
        example='vismmoe infer --image photo.png --prompt "How many objects are in the image?" --device-memory 34MiB',
    ),
    "eval": Command(
        "score a benchmark, and what dropping visual tokens costs on it", "EvalConfig", "evaluate",
        example="vismmoe eval --benchmark pope --data POPE.tsv --keep-ratio 0.7 0.5 --compressor affinity random",
    ),
    "bench": Command(
        "compare with other systems, side by side", "BenchConfig", "bench",
        example="vismmoe bench --image photo.png --device-memory 34MiB --baseline resident mmap",
    ),
    "simulate": Command(
        "replay routing logs against devices and cache rules", "SimulateConfig", "simulate",
        example="vismmoe simulate --traces runs/traces --profile configs/devices/*.yaml --policy lru lfu",
    ),
    "report": Command(
        "draw pictures of logs, artifacts and runs on one page", "ReportConfig", "report",
        example="vismmoe report --traces runs/traces --artifact runs/artifact --output runs/report",
    ),
    "serve": Command("answer over HTTP"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    name = next((word for word in words if word != "--debug"), "")
    who = f"vismmoe {name}" if name in COMMANDS else "vismmoe"
    return guarded(who, lambda: _dispatch(words), debug="--debug" in words)


def _dispatch(words: list[str]) -> int:
    while words[:1] == ["--debug"]:
        words = words[1:]
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        return _print(overview())
    if name == "--version":
        return _print(_version())
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(f"Unknown {kind} {name!r}.{did_you_mean(name, COMMANDS)} `vismmoe --help` lists the commands.")
    if not COMMANDS[name].config:
        return _unbuilt(name, words[1:])
    return _run(name, words[1:])


def _run(name: str, words: list[str]) -> int:
    """Parse the words after the command, call its function with its config."""
    from vismmoe import config as configs
    from vismmoe.flags import parse, parser_for
    from vismmoe.settings import build

    command = COMMANDS[name]
    kind: type[Config] = getattr(configs, command.config)
    flags = parse(parser_for(name, command, kind), words)
    if flags is None:
        return 0
    files, debug = flags.pop("config", ()), flags.pop("debug", False)
    config = build(kind, files, flags)
    if not debug:
        quieten()
    from vismmoe import commands

    function: Run = getattr(commands, command.function)
    results = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries that print must not spoil the results
        function(config, results)
    results.flush()
    return 0


def overview() -> str:
    """What `vismmoe --help` prints."""
    built = [f"  {name:<10}{command.about}" for name, command in COMMANDS.items() if command.config]
    unbuilt = [f"  {name:<10}{command.about}" for name, command in COMMANDS.items() if not command.config]
    return "\n".join((
        "usage: vismmoe COMMAND [flags]      (vismmoe COMMAND --help shows every flag)",
        "",
        "Vision-language mixture-of-experts models in little memory.",
        "",
        *built,
        "",
        "not built yet:",
        *unbuilt,
        "",
        "  --version  print the version",
        "  --debug    show the traceback when something fails",
        "",
        "Without --model, commands use the small reference model in checkpoints/reference.",
        "exit status: 0 done, 2 usage, 3 input data, 4 does not fit in memory, 130 interrupted, 1 anything else",
    ))  # fmt: skip


def _unbuilt(name: str, words: list[str]) -> int:
    sentence = f"vismmoe {name}: not built yet. It will {COMMANDS[name].about}."
    if {"-h", "--help"} & set(words):
        return _print(sentence)
    raise UsageError(f"not built yet. It will {COMMANDS[name].about}; `vismmoe --help` lists what works today.")


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"vismmoe {version('vismmoe')}"
    except PackageNotFoundError:
        return "vismmoe (not installed)"


def _print(text: str) -> int:
    print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
