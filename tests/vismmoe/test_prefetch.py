"""The watchdog gives up on copies that nobody uses, and says so."""

from __future__ import annotations

from vismmoe.prefetch import Watchdog


def test_wasted_copies_turn_prefetching_down_and_are_told() -> None:
    watchdog = Watchdog(20)
    for _ in range(Watchdog.SAMPLE):
        watchdog.issued(1)
    assert watchdog.top == 10
    assert "from 20 to 10" in watchdog.notes[0]
    for _ in range(10 * Watchdog.SAMPLE):
        watchdog.issued(1)
    assert watchdog.top == 1, "never below one: what the user asked for stays on"
    assert len(watchdog.notes) == 1


def test_useful_copies_leave_prefetching_alone() -> None:
    watchdog = Watchdog(20)
    for number in range(5 * Watchdog.SAMPLE):
        watchdog.issued(1)
        if number % 4 == 0:
            watchdog.used()
    assert watchdog.top == 20
    assert watchdog.notes == []


def test_dropped_copies_cost_nothing() -> None:
    watchdog = Watchdog(20)
    for _ in range(3 * Watchdog.SAMPLE):
        watchdog.issued(1)
        watchdog.issued(-1)
    assert watchdog.top == 20
