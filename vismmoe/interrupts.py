"""Ctrl-C ends the program in any phase, with one line and exit status 130."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

LINE = "vismmoe: interrupted."
STATUS = 130
GRACE_S = 5.0  # for threads to end and files to be closed


class Interrupts:
    """While entered, SIGINT raises KeyboardInterrupt and is remembered.

    Remembering matters because KeyboardInterrupt does not always arrive: an import cut in half surfaces as ImportError,
    Lightning turns it into SystemExit, and a bare `except` swallows it. A second Ctrl-C, or GRACE_S without an end,
    leaves at once.
    """

    def __init__(self) -> None:
        self.happened = False
        self._telling = threading.Lock()  # taken by the thread that says it, and never given back: it is said once
        self._told = threading.Event()
        self._before: Any = None
        self._in_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupts:
        if self._in_main_thread:  # Python delivers signals nowhere else
            self._before = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interruption the handler stays: a further Ctrl-C while threads end must not print a traceback.
        if self._in_main_thread and not self.happened and signal.getsignal(signal.SIGINT) == self._on_sigint:
            signal.signal(signal.SIGINT, self._before)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self.happened:
            self._leave()
        self.happened = True
        # What is torn down half-way (destructors, callbacks) reports here; it is no news after Ctrl-C.
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
        timer = threading.Timer(GRACE_S, self._leave)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    def tell(self) -> int:
        """Say so once; returns the exit status."""
        if self._telling.acquire(blocking=False):
            try:
                print(LINE, file=sys.stderr, flush=True)
            finally:
                self._told.set()
        return STATUS

    def _leave(self) -> None:
        if self._telling.acquire(blocking=False):
            with suppress(OSError):
                os.write(2, f"{LINE}\n".encode())  # print() may be what was interrupted
        elif threading.current_thread() is not threading.main_thread():
            self._told.wait(1.0)  # the main thread is about to say it
        os._exit(STATUS)
