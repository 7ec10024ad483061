"""Asking the mailbox for what is still to come: the longer it takes, the less often."""

from __future__ import annotations

from dataclasses import dataclass

PATIENCE = 1 / 8
"""It is asked again after this part of the time that has been waited so far, so the answer comes later by no more."""


@dataclass(slots=True)
class Wait:
    """For one thing, by this learner's clock. Asking costs the logarithm of the time that it takes, beyond the first looks."""

    since: float
    asked_at: float | None = None

    def is_time(self, now: float) -> bool:
        """Whether to ask now; then ``now`` is taken down."""
        if self.asked_at is not None and now - self.asked_at < PATIENCE * (self.asked_at - self.since):
            return False
        self.asked_at = now
        return True
