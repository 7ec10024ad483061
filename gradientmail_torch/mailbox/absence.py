"""How long a mailbox has been away, as far as this machine was awake to see."""

from __future__ import annotations

from gradientmail_torch.clock import Clock

_LONGEST_GAP_S = 60.0


class Absence:
    """Adds up the time over which requests failed.

    A machine that was suspended must not take its own sleep for the store's: of the time between two failures at
    most a minute counts.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._failed_at: float | None = None
        self._seconds = 0.0

    def answered(self) -> None:
        """The mailbox has answered: it is not away."""
        self._failed_at, self._seconds = None, 0.0

    def failed(self) -> float:
        """A request failed, after retries. Seconds since the first of the failures that had no answer in between."""
        now = self._clock.monotonic()
        if self._failed_at is not None:
            self._seconds += min(now - self._failed_at, _LONGEST_GAP_S)
        self._failed_at = now
        return self._seconds
