"""The times by which a session lives. All are this machine's own; none is compared with another's."""

from __future__ import annotations

from dataclasses import dataclass

from gradientmail_torch.errors import ConfigError

BEATS_PER_LEASE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    lease: float = 30.0
    """Seconds of silence after which the others go on without a learner."""
    poll_interval: float = 1.0
    """Seconds between two looks at the mailbox."""
    outage_timeout: float = 600.0
    """Seconds that the mailbox may be away before the training thread is told."""
    step_timeout: float = 600.0
    """Seconds that a synchronous algorithm waits for the others."""
    keep: int | None = 4
    """Versions of a fragment whose data stays in the mailbox; None keeps everything."""
    keep_seconds: float = 60.0
    """And the seconds it stays at least."""

    def __post_init__(self) -> None:
        for name in ("lease", "poll_interval", "outage_timeout", "step_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.keep is not None and self.keep < 1:
            raise ConfigError(f"keep must be None or at least 1 version, not {self.keep!r}")
        if not self.keep_seconds >= 0:
            raise ConfigError(f"keep_seconds must be at least 0, not {self.keep_seconds!r}")

    @property
    def beat_interval(self) -> float:
        return self.lease / BEATS_PER_LEASE

    @property
    def claim_delay(self) -> float:
        """How long the next in the order waits for the one before it to claim a round."""
        return max(2 * self.poll_interval, self.lease / 10)

    @property
    def merge_timeout(self) -> float:
        """How long the owner of a claim has, while it is alive, before another may merge as well."""
        return 4 * self.lease

    @property
    def quorum_warning(self) -> float:
        return max(30.0, self.lease)
