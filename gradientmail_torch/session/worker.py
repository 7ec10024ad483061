"""A named background thread that repeats one bounded piece of work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.mailbox.absence import Absence

log = logging.getLogger(__name__)


class Worker:
    """Calls ``tick`` until stopped. ``tick`` returns the seconds after which it wants to be called again.

    A mailbox that does not answer is waited for, up to ``outage_timeout`` seconds; any other error ends the
    worker and is handed to ``on_failure``.
    """

    def __init__(
        self, name: str, tick: Callable[[], float], *, clock: Clock, outage_timeout: float, on_failure: Callable[[Exception], None]
    ) -> None:
        self.name = name
        self._tick = tick
        self._clock = clock
        self._outage_timeout = outage_timeout
        self._on_failure = on_failure
        self._awake = threading.Event()
        self._stopping = False
        self._begun = self._ended = 0
        self._task = clock.spawn(self._run, name=name)

    def wake(self) -> None:
        """Have ``tick`` called now."""
        self._awake.set()

    def next_tick(self) -> Callable[[], bool]:
        """Have ``tick`` called now. What is returned says whether a call that began after this has ended well."""
        number = self._begun + 1
        self._awake.set()
        return lambda: self._ended >= number

    def stop(self) -> None:
        """Ask the thread to end after the present tick; :meth:`join` waits for it."""
        self._stopping = True
        self._awake.set()

    def join(self, timeout: float) -> bool:
        return self._task.join(timeout)

    def tick(self) -> float:
        """One call, in whichever thread; the worker's own, but for tests."""
        self._begun += 1
        pause = self._tick()
        self._ended = self._begun
        return pause

    def _run(self) -> None:
        absence = Absence(self._clock)
        while not self._stopping:
            try:
                pause = self.tick()
                absence.answered()
            except MailboxUnavailable as error:
                away = absence.failed()
                if away > self._outage_timeout:
                    self._on_failure(error)
                    return
                log.warning("%s: the mailbox does not answer for %.0f s, training goes on: %s", self.name, away, error)
                pause = 1.0
            except Exception as error:
                self._on_failure(error)
                return
            self._clock.wait(self._awake, max(0.0, pause))
            self._awake.clear()
