"""A clock that a unit test moves. For several threads or nodes there is :class:`SimulatedCluster`."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

from gradientmail_torch.clock import Task


class ManualClock:
    """Time that passes at once: a sleep or a wait moves the clock and returns.

    What others do meanwhile is planned with :meth:`at`, and happens when the clock gets there. A wait without
    end that nothing planned would end fails instead of hanging.
    """

    def __init__(self, *, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = monotonic
        self._wall_offset = wall - monotonic
        self._order = itertools.count()
        self._plan: list[tuple[float, int, Callable[[], object]]] = []
        self.sleeps: list[float] = []
        """Seconds of each sleep, in order."""

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Do ``action`` when ``seconds`` more have passed."""
        heapq.heappush(self._plan, (self._now + seconds, next(self._order), action))

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass, doing what is planned for them."""
        end = self._now + seconds
        while self._plan and self._plan[0][0] <= end:
            self._do_next()
        self._now = end

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.advance(max(0.0, seconds))

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        end = float("inf") if timeout is None else self._now + timeout
        while not event.is_set() and self._plan and self._plan[0][0] <= end:
            self._do_next()
        if not event.is_set():
            if timeout is None:
                raise AssertionError("waits for an event that nothing planned on this clock sets")
            self._now = max(self._now, end)
        return event.is_set()

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        raise AssertionError(f"a manual clock runs no threads ({name!r}): use SimulatedCluster")

    def _do_next(self) -> None:
        self._now, _, action = heapq.heappop(self._plan)
        action()
