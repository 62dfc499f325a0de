"""Several computations that take turns and meet: coroutines whose bodies are ordinary code, hence threads.

Exactly one of them, or the caller, runs at any moment; each runs on until it meets the others or ends. So what they
share needs no lock, and they come to the meeting in the same order every time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Call = TypeVar("Call")
Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")


class _Abandoned(BaseException):
    """Unwinds a computation whose companions will not come back."""


class _Participant(Generic[Call, Answer, Outcome]):
    """One computation: a thread that runs only between `go` and `back`."""

    def __init__(self, body: Callable[[], Outcome]) -> None:
        self.body = body
        self.go = threading.Semaphore(0)
        self.back = threading.Semaphore(0)
        self.done = False
        self.call: list[Call] = []  # what it came to the meeting with
        self.answer: list[Answer] = []
        self.outcome: list[Outcome] = []
        self.error: BaseException | None = None


class LockStep(Generic[Call, Answer, Outcome]):
    """Runs `bodies` in turns. Each may call meet(); once all that have not ended did, `together` answers those at once
    whose calls have the lowest rank. The others wait for these to catch up.

    `together` runs in the thread that called run(): calls in the order of the bodies, answers in the same order.
    """

    def __init__(
        self,
        bodies: Sequence[Callable[[], Outcome]],
        together: Callable[[list[Call]], Sequence[Answer]],
        rank: Callable[[Call], tuple[int, ...]] = lambda call: (),
    ) -> None:
        self._together = together
        self._rank = rank
        self._here = threading.local()
        self._abandoned = False
        self._participants: list[_Participant[Call, Answer, Outcome]] = [_Participant(body) for body in bodies]
        self._threads = [
            threading.Thread(target=self._body, args=(each,), name=f"vismmoe-turn-{place}", daemon=True)
            for place, each in enumerate(self._participants)
        ]

    def run(self) -> list[Outcome]:
        """What each body returned. The first error of a body, or of `together`, ends all of them and is raised."""
        for thread in self._threads:
            thread.start()
        try:
            waiting: list[_Participant[Call, Answer, Outcome]] = []
            running = self._participants
            while True:
                came = [each for each in running if self._turn(each)]
                live = [each for each in self._participants if each in came or each in waiting]
                if not live:
                    break
                first = min(self._rank(each.call[0]) for each in live)
                running = [each for each in live if self._rank(each.call[0]) == first]
                waiting = [each for each in live if each not in running]
                answers = self._together([each.call.pop() for each in running])
                for each, answer in zip(running, answers, strict=True):
                    each.answer.append(answer)
        finally:
            self._abandon()
        return [each.outcome[0] for each in self._participants]

    def meet(self, call: Call) -> Answer:
        """Called by a body, in its own thread: wait until all others have come too, and get the answer."""
        me: _Participant[Call, Answer, Outcome] = self._here.participant
        me.call.append(call)
        me.back.release()
        me.go.acquire()
        if self._abandoned:
            raise _Abandoned
        return me.answer.pop()

    def _turn(self, each: _Participant[Call, Answer, Outcome]) -> bool:
        """Let it run on; False when it has ended."""
        each.go.release()
        each.back.acquire()
        if each.error is not None:
            raise each.error
        return not each.done

    def _body(self, me: _Participant[Call, Answer, Outcome]) -> None:
        self._here.participant = me
        me.go.acquire()
        try:
            if not self._abandoned:
                me.outcome.append(me.body())
        except _Abandoned:
            pass
        except BaseException as error:
            me.error = error
        finally:
            me.done = True
            me.back.release()

    def _abandon(self) -> None:
        """Unwind whoever has not ended, an interrupted one at its next meeting; no thread stays behind."""
        self._abandoned = True
        for each, thread in zip(self._participants, self._threads, strict=True):
            each.go.release()
            thread.join()
