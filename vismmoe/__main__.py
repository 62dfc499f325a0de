"""Where the program `vismmoe` begins: Ctrl-C is taken care of before anything that takes time is imported."""

from __future__ import annotations

import signal
import sys

from vismmoe.interrupts import Interrupts


def main() -> int:
    """Exit status of the command line."""
    with Interrupts() as interrupts:
        try:
            from vismmoe.cli import main as run
        except BaseException:  # an import cut in half raises anything
            if not interrupts.happened:
                raise
            return interrupts.tell()
        status = run()
    # All is said and written: while torch and its threads are torn down, Ctrl-C must not turn success into a death.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.exit(main())
