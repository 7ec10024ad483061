"""What a learner keeps of its own progress when it adopts a commit: pure decisions."""

from __future__ import annotations

from enum import Enum
from typing import Literal

AdoptionRule = Literal["rebase", "overwrite", "mix"]


class Outcome(Enum):
    """What has become of a contribution."""

    OPEN = "open"
    """In no commit yet: uploading, recorded in the open round, or late and offered again."""
    MERGED = "merged"
    """A commit names its nonce."""
    RETRY = "retry"
    """Left out through no fault of its own; the progress is sound and may be offered anew."""
    REJECTED = "rejected"
    """Left out because of what it is (not finite, bad form): keeping it would carry the fault for ever."""


class Keep(Enum):
    """Which of the learner's own steps survive the adoption of a commit."""

    SINCE_SNAPSHOT = "those after the snapshot that the commit holds"
    ALL = "all since the base"
    NONE = "none"


def what_to_keep(outcome: Outcome | None) -> Keep:
    """``outcome`` is that of the contribution on its way, None when there is none."""
    match outcome:
        case Outcome.MERGED:
            return Keep.SINCE_SNAPSHOT
        case Outcome.REJECTED:
            return Keep.NONE
        case _:
            return Keep.ALL
