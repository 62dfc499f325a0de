"""One writer at a time: two runs into one folder would overwrite each other's files without a word."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vismmoe.errors import UsageError


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """While entered, no other run of this project writes to `output`, a file or a folder that need not exist yet.

    The kernel lets go of the lock when the process ends, however it ends. Raises UsageError when another run has it, or
    when nothing can be written there.
    """
    made = not output.parent.exists()
    lock = output.with_name(f".{output.name[:200]}.lock")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        held = _locked(lock)
    except BlockingIOError:
        raise UsageError(f"Another run is writing to {output}: wait for it, or name another --output.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{output!s:.300} cannot be written to: {getattr(error, 'strerror', error)}.") from None
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(held)
        if made:
            with suppress(OSError):
                output.parent.rmdir()  # only if nothing was written


def _locked(lock: Path) -> int:
    """A descriptor of `lock` that holds the lock on the very file that has this name now."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever had it before has taken the name away
