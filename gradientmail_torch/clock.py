"""Time, waiting and threads: the only module that sleeps, reads a clock or starts a thread.

Everything whose order a simulation must own goes through a :class:`Clock`, so that the same session and
patterns run on real time and on :class:`gradientmail_torch.testing.SimulatedCluster`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from gradientmail_torch.errors import ConfigError


class Task(Protocol):
    """Something running in the background."""

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most ``timeout`` seconds. True when it has ended."""
        ...


class Clock(Protocol):
    """What a learner may know of time. Nothing here is comparable between machines."""

    def monotonic(self) -> float:
        """Seconds since some moment of this process; never runs backwards."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 by this machine's clock: for people to read, never for a decision."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        """Wait until ``event`` is set, at most ``timeout`` seconds. True when it is set."""
        ...

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        """Run ``target`` in a background thread. ``target`` handles its own errors."""
        ...


class _ThreadTask:
    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def join(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()


class SystemClock:
    """Real time and real threads."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        return event.wait(timeout)

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        # Daemon, so that a training script that dies without closing its session still ends.
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return _ThreadTask(thread)


SYSTEM_CLOCK = SystemClock()


class Reminder:
    """Due after ``first_s`` seconds of a wait, and again each time that the wait has become twice as long."""

    def __init__(self, clock: Clock, first_s: float) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self._due_s = first_s

    def due(self) -> float:
        """Seconds waited so far when it is time to say something; 0 otherwise."""
        waited = self._clock.monotonic() - self._began
        if waited < self._due_s:
            return 0.0
        while self._due_s <= waited:
            self._due_s *= 2
        return waited


def check_timeout(timeout: float | None) -> None:
    """Raises :class:`ConfigError` unless ``timeout`` is None or seconds to wait; NaN, with which nothing ever ends, is neither."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not (number and timeout >= 0):
        raise ConfigError(f"timeout must be None or at least 0 seconds, not {timeout!r}")
