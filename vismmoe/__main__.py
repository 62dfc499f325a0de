"""Where the program `vismmoe` begins: Ctrl-C is taken care of before anything that takes time is imported."""

from __future__ import annotations

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
        return run()


if __name__ == "__main__":
    sys.exit(main())
