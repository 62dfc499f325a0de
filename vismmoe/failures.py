"""How our programs fail: one sentence on stderr, an exit status per kind, a traceback only on demand."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from vismmoe.errors import BudgetError, VisMMoEError
from vismmoe.interrupts import Interrupts

TRAINING_PACKAGES = ("lightning", "torchmetrics", "datasets", "optuna", "mlflow")  # the extra [train]

LONGEST = 1500  # letters of a message


def guarded(who: str, body: Callable[[], int], debug: bool = False) -> int:
    """Exit status of `body`; whatever it raises becomes `who`: sentence. Ctrl-C is 130 in any phase."""
    with Interrupts() as interrupts:
        try:
            return body()
        except BaseException as error:
            if debug and not isinstance(error, (SystemExit, BrokenPipeError)):
                import traceback

                traceback.print_exc()
            if interrupts.happened or isinstance(error, KeyboardInterrupt):
                return interrupts.tell()
            return _status(who, error)


def prepare_streams() -> None:
    """Streams that whoever started us has closed swallow what they are given (Python would write to another one), and
    letters that a terminal's encoding lacks, and bytes in file names that are no text, are shown as escapes."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - for as long as the program runs
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def quieten() -> None:
    """Keep other libraries' chatter off the terminal; to be called before they are imported."""
    import warnings

    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _status(who: str, error: BaseException) -> int:
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has gone; Python would complain again when it flushes at exit.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if isinstance(error, VisMMoEError):
        return _tell(who, str(error), error.exit_status)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        hint = "Give less with --device-memory, or free some."
        return _tell(who, f"memory ran out ({error}). {hint}", BudgetError.exit_status)
    if isinstance(error, ModuleNotFoundError) and error.name in TRAINING_PACKAGES:
        return _tell(who, f"this needs {error.name}, which is not installed: pip install 'vismmoe[train]'.", 1)
    if isinstance(error, OSError):
        return _tell(who, f"{error}.", 1)
    return _tell(who, f"unexpected {type(error).__name__}: {error}. Run it again with --debug to see where.", 1)


def _tell(who: str, sentence: str, status: int) -> int:
    told = " ".join(sentence.split())
    if len(told) > LONGEST:  # a file name or a value of many thousand letters
        told = f"{told[: LONGEST // 2]} … {told[-LONGEST // 2 :]}"
    print(f"{who}: {told}", file=sys.stderr, flush=True)
    return status
