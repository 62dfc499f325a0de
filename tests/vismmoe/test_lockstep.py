"""Computations in lock-step: turns, meetings, endings."""

from __future__ import annotations

import threading

import pytest

from vismmoe.lockstep import LockStep


def test_all_that_still_run_meet_and_each_gets_its_own_answer() -> None:
    meetings: list[list[int]] = []

    def together(calls: list[int]) -> list[int]:
        meetings.append(calls)
        return [10 * call for call in calls]

    def body(start: int, steps: int) -> list[int]:
        return [steps_in_lock.meet(start + step) for step in range(steps)]

    steps_in_lock: LockStep[int, int, list[int]] = LockStep(
        [lambda: body(0, 3), lambda: body(100, 1), lambda: body(200, 0), lambda: body(300, 2)], together
    )
    assert steps_in_lock.run() == [[0, 10, 20], [1000], [], [3000, 3010]]
    assert meetings == [[0, 100, 300], [1, 301], [2]]


def test_only_one_runs_at_a_time() -> None:
    running, most = [0], [0]

    def body() -> None:
        for _ in range(50):
            running[0] += 1
            most[0] = max(most[0], running[0])
            running[0] -= 1
            steps.meet(None)

    steps: LockStep[None, None, None] = LockStep([body] * 8, lambda calls: [None] * len(calls))
    steps.run()
    assert most == [1]


@pytest.mark.parametrize("error", [ValueError("one"), KeyboardInterrupt()])
def test_the_error_of_one_ends_all(error: BaseException) -> None:
    ended: list[str] = []

    def patient() -> None:
        try:
            while True:
                steps.meet(0)
        finally:
            ended.append("patient")

    def failing() -> None:
        steps.meet(0)
        raise error

    steps: LockStep[int, int, None] = LockStep([patient, failing, patient], lambda calls: calls)
    with pytest.raises(type(error)):
        steps.run()
    assert ended == ["patient", "patient"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vismmoe-turn")]


def test_an_error_of_the_meeting_reaches_the_caller() -> None:
    def refuse(calls: list[int]) -> list[int]:
        raise OSError("no room")

    steps: LockStep[int, int, int] = LockStep([lambda: steps.meet(1), lambda: steps.meet(2)], refuse)
    with pytest.raises(OSError, match="no room"):
        steps.run()
