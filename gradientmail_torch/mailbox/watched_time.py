"""How long this machine has been watching: awake, and answered by the mailbox."""

from __future__ import annotations

from gradientmail_torch.clock import Clock


class WatchedTime:
    """Runs while the mailbox answers: of the time between two answers at most ``longest_gap`` seconds count.

    With a gap of about one heartbeat, an outage or a sleep of our own proves no more than one missing beat does. To
    begin anew after each gap would keep the dead alive for ever where the network is so slow that gaps are the rule.
    """

    def __init__(self, clock: Clock, *, longest_gap: float) -> None:
        self._clock = clock
        self._longest_gap_s = longest_gap
        self._answered_at = clock.monotonic()
        self._seconds = 0.0

    def answered(self) -> float:
        """To be called at each answer of the mailbox. Seconds of watching until now."""
        now = self._clock.monotonic()
        self._seconds += min(now - self._answered_at, self._longest_gap_s)
        self._answered_at = now
        return self._seconds

    def asking(self) -> float:
        """Seconds of watching until now, should the mailbox answer what it is asked now."""
        return self._seconds + min(self._clock.monotonic() - self._answered_at, self._longest_gap_s)
