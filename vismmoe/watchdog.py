"""Turns prefetching down when it loses against loading on demand: on a busy link useless copies delay useful ones."""

from __future__ import annotations

import statistics


class Watchdog:
    """Looks at decode only; in a prefill nearly all is needed anyway.

    What is loaded ahead must be needed with a chance of `bar` or more. Two signs raise it: too few copies are used, or
    tokens take longer than without prefetching, which is tried for a few tokens now and then (ever less often while
    prefetching wins). It counts and compares what it is told and asks no clock.
    """

    BAR = 0.5  # least stall and few bytes in vain, on replays of the disk benchmark
    SAMPLE = 48  # copies before judging by use
    WORTH = 0.25  # share of copies that must be used
    PERIOD = 32  # tokens with prefetching before the first trial without
    TRIAL = 6  # tokens without
    MARGIN = 1.05  # how much slower it must be than without
    MOST = 0.95  # the bar rises no further: what was asked for stays on

    def __init__(self, top: int) -> None:
        self.top = top  # experts foreseen after each decoded layer, at most
        self.notes: list[str] = []
        self._bar = self.BAR
        self._issued = self._used = 0
        self._period = self.PERIOD
        self._with: list[float] = []  # ms of tokens, since the last trial
        self._without: list[float] = []
        self._on_trial = False
        self._active = False  # something was prefetched since the last trial

    @property
    def allowed(self) -> int:
        """Experts that may be foreseen now: none while tokens without prefetching are timed."""
        return 0 if self._on_trial else self.top

    @property
    def bar(self) -> float:
        """The chance of being needed below which nothing is loaded ahead."""
        return self._bar

    def issued(self, count: int) -> None:
        """`count` copies were started (or, negative, dropped before they began)."""
        self._active = True
        self._issued += count
        if self._issued < self.SAMPLE:
            return
        if self._used < self.WORTH * self._issued:
            self._turn_down(f"less than {self.WORTH:.0%} of what was loaded ahead was used")
        self._issued = self._used = 0

    def used(self) -> None:
        self._used += 1

    def token(self, took_ms: float) -> None:
        """A token was decoded, from one to the next in so many ms."""
        (self._without if self._on_trial else self._with).append(took_ms)
        if not self._on_trial:
            self._on_trial = self._active and self._bar < self.MOST and len(self._with) >= self._period
        elif len(self._without) > self.TRIAL:
            self._judge()

    def _judge(self) -> None:
        slow = statistics.median(self._with[-self.PERIOD :])
        fast = statistics.median(self._without[1:])  # the first still found what was loaded ahead for it
        if slow > self.MARGIN * fast:
            self._turn_down(f"tokens took {slow:.2f} ms with it and {fast:.2f} ms without")
            self._period = self.PERIOD
        else:
            self._period *= 2
        self._with, self._without = [], []
        self._on_trial = self._active = False

    def _turn_down(self, why: str) -> None:
        if self._bar < self.MOST:
            self._bar = min(self.MOST, 1.0 - (1.0 - self._bar) / 2)
            self.notes = [
                f"Prefetching was turned down to experts that are needed with a chance of {self._bar:.0%} or more "
                f"({self.BAR:.0%} at first): {why}."
            ]
