"""The times by which a session lives. All are this machine's own; none is compared with another's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradientmail_torch.errors import ConfigError

BEATS_PER_LEASE = 6
LOOKS_PER_CYCLE = 20
LONGEST_LOOK_S, SHORTEST_LOOK_S = 1.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    lease: float = 30.0
    """Seconds of silence after which the others go on without a learner."""
    poll_interval: float | None = None
    """Seconds between two looks at the mailbox; None looks 20 times a cycle, but 0.1 to 1 second apart."""
    outage_timeout: float = 600.0
    """Seconds that the mailbox may be away before the training thread is told."""
    step_timeout: float = 600.0
    """Seconds that a synchronous algorithm waits for the others."""
    keep: int | None = 4
    """Versions of a fragment whose data stays in the mailbox; None keeps everything."""
    keep_seconds: float = 60.0
    """And the seconds it stays at least."""

    def __post_init__(self) -> None:
        if self.poll_interval is not None and not self.poll_interval > 0:
            raise ConfigError(f"poll_interval must be None or above 0 seconds, not {self.poll_interval!r}")
        for name in ("lease", "outage_timeout", "step_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep must be None or at least 1 version, not {self.keep!r}")
        if not self.keep_seconds >= 0:
            raise ConfigError(f"keep_seconds must be at least 0, not {self.keep_seconds!r}")

    def look_interval(self, cycle_s: float) -> float:
        """Seconds between two looks of a learner whose cycles take ``cycle_s``: what comes late by them is part of a step."""
        if self.poll_interval is not None:
            return self.poll_interval
        return min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, cycle_s / LOOKS_PER_CYCLE))

    @property
    def longest_look(self) -> float:
        return self.look_interval(math.inf)

    @property
    def beat_interval(self) -> float:
        return self.lease / BEATS_PER_LEASE

    @property
    def claim_delay(self) -> float:
        """How long the next in the order waits for the one before it to claim a round."""
        return max(2 * self.longest_look, self.lease / 10)

    @property
    def merge_timeout(self) -> float:
        """How long the owner of a claim has, while it is alive, before another may merge as well."""
        return 4 * self.lease

    @property
    def quorum_warning(self) -> float:
        return max(30.0, self.lease)
