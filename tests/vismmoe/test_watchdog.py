"""The watchdog gives up on copies that nobody uses and on prefetching that makes tokens slower, and says so."""

from __future__ import annotations

import pytest

from vismmoe.watchdog import Watchdog


def issue(watchdog: Watchdog, count: int, used_every: int = 0) -> None:
    for number in range(count):
        if used_every and number % used_every == 0:
            watchdog.used()
        watchdog.issued(1)


def test_wasted_copies_raise_the_bar_and_are_told_once() -> None:
    watchdog = Watchdog(20)
    issue(watchdog, Watchdog.SAMPLE)
    assert watchdog.bar == pytest.approx(0.75)
    assert watchdog.notes == [
        "Prefetching was turned down to experts that are needed with a chance of 75% or more (50% at first): less than "
        "25% of what was loaded ahead was used."
    ]
    issue(watchdog, 10 * Watchdog.SAMPLE)
    assert watchdog.bar == Watchdog.MOST < 1.0, "never to nothing: what the user asked for stays on"
    assert len(watchdog.notes) == 1


def test_useful_copies_leave_prefetching_alone() -> None:
    watchdog = Watchdog(20)
    issue(watchdog, 5 * Watchdog.SAMPLE, used_every=3)
    assert watchdog.bar == Watchdog.BAR
    assert watchdog.notes == []


def test_dropped_copies_cost_nothing() -> None:
    watchdog = Watchdog(20)
    for _ in range(3 * Watchdog.SAMPLE):
        watchdog.issued(1)
        watchdog.issued(-1)
    assert watchdog.bar == Watchdog.BAR


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
    assert watchdog.bar == pytest.approx(0.75)
    assert watchdog.notes == [
        "Prefetching was turned down to experts that are needed with a chance of 75% or more (50% at first): tokens "
        "took 5.00 ms with it and 4.00 ms without."
    ]


def test_it_goes_on_being_turned_down_while_it_loses_and_then_is_tried_no_more() -> None:
    watchdog = Watchdog(20)
    round_tokens = Watchdog.PERIOD + Watchdog.TRIAL + 1
    tokens(watchdog, 5 * round_tokens, with_ms=5.0, without_ms=4.0)
    assert watchdog.bar == Watchdog.MOST
    assert tokens(watchdog, 5 * round_tokens, with_ms=5.0, without_ms=4.0).count(0) == 0


def test_prefetching_that_wins_is_tried_ever_less_often() -> None:
    watchdog = Watchdog(20)
    allowed = tokens(watchdog, 1000, with_ms=4.0, without_ms=5.0)
    trials = allowed.count(0) / (Watchdog.TRIAL + 1)
    assert 2 <= trials <= 5
    assert watchdog.bar == Watchdog.BAR
    assert watchdog.notes == []


def test_what_never_prefetches_is_never_tried() -> None:
    watchdog = Watchdog(20)
    for _ in range(1000):
        watchdog.token(1.0)
        assert watchdog.allowed == 20
