"""When a round closes, and whose turn it is to merge it: pure decisions."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """An open round as one learner sees it."""

    contributors: frozenset[str]
    """Learners whose contribution is in the round."""
    training: frozenset[str]
    """Live learners that are training: those for which the round may wait."""
    staying: frozenset[str]
    """Live learners in any state but leaving."""


def quorum_reached(view: RoundView, quorum_size: int) -> bool:
    """Whether the round may close at all. When every live learner is leaving, the quorum is what is left."""
    return bool(view.contributors) and (len(view.contributors) >= quorum_size or not view.staying)


def closes(view: RoundView, *, since_quorum_s: float, grace_s: float) -> bool:
    """Whether a round that has its quorum closes now: when all have contributed, or the grace has passed."""
    return view.training <= view.contributors or since_quorum_s >= grace_s


SLOW_UPLINK = 1 / 3
"""Learners below this part of the median uplink merge last."""


def merge_order(run: str, fragment: int, version: int, uplinks: Mapping[str, float]) -> list[str]:
    """The live learners in the order in which they may claim a round: rendezvous hash, slow uplinks last.

    ``uplinks`` gives bytes per second by learner ID, 0 for unknown. All learners that see the same peers
    compute the same order, and over fragments and versions the work spreads evenly.
    """
    known = [uplink for uplink in uplinks.values() if uplink > 0]
    slow = statistics.median(known) * SLOW_UPLINK if known else 0.0

    def place(learner_id: str) -> tuple[bool, bytes]:
        return 0 < uplinks[learner_id] < slow, _digest(f"{run}|{fragment}|{version}|{learner_id}")

    return sorted(uplinks, key=place)


def groups_ahead(contributors_before: int, fan_in: int) -> int:
    """Groups whose contributions are summed ahead of the merge; 0 where a syncer may well read them all itself.

    By the number of contributors to the commit before, which all learners know.
    """
    return math.ceil(contributors_before / fan_in) if contributors_before > fan_in else 0


def group_of(run: str, learner_id: str, groups: int) -> int:
    """The group that a learner is in, the same for all who ask."""
    return int.from_bytes(_digest(f"{run}|group|{learner_id}")[:8], "big") % groups


def delegate_order(run: str, fragment: int, version: int, uplinks: Mapping[str, float]) -> list[str]:
    """The members of a group in the order in which they sum it up; another order than that of :func:`merge_order`."""
    return merge_order(f"{run}|ahead", fragment, version, uplinks)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def waited_for(view: RoundView) -> Collection[str]:
    """The learners a round is still hoping for."""
    return sorted(view.training - view.contributors)
