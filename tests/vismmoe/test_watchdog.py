"""The watchdog gives up on copies that nobody uses, and says so."""

from __future__ import annotations

from vismmoe.watchdog import Watchdog


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


def tokens(watchdog: Watchdog, count: int, with_ms: float, without_ms: float) -> list[int]:
    """So many tokens, each with a useful copy; how many experts were allowed at each."""
    allowed = []
    for _ in range(count):
        allowed.append(watchdog.allowed)
        if watchdog.allowed:
            watchdog.issued(1)
            watchdog.used()
        watchdog.token(with_ms if watchdog.allowed else without_ms)
    return allowed


def test_prefetching_that_makes_tokens_slower_is_turned_down_with_both_times() -> None:
    watchdog = Watchdog(20)
    allowed = tokens(watchdog, Watchdog.PERIOD + Watchdog.TRIAL + 1, with_ms=5.0, without_ms=4.0)
    assert allowed.count(0) == Watchdog.TRIAL + 1
    assert watchdog.top == 10
    assert watchdog.notes == [
        "Prefetching was turned down from 20 to 10 experts a layer: tokens took 5.00 ms with it and 4.00 ms without."
    ]


def test_prefetching_that_wins_is_tried_ever_less_often() -> None:
    watchdog = Watchdog(20)
    allowed = tokens(watchdog, 1000, with_ms=4.0, without_ms=5.0)
    trials = allowed.count(0) / (Watchdog.TRIAL + 1)
    assert 2 <= trials <= 4
    assert watchdog.top == 20
    assert watchdog.notes == []


def test_what_never_prefetches_is_never_tried() -> None:
    watchdog = Watchdog(20)
    for _ in range(1000):
        watchdog.token(1.0)
        assert watchdog.allowed == 20
