"""The invariants that a simulated training is held to."""

from __future__ import annotations

from enum import StrEnum


class Invariant(StrEnum):
    """What holds in every run; the numbers are those under which the design lists them."""

    ONE_COMMIT = "1: a version of a fragment is committed once, and stays"
    SAME_BITS = "1: all who adopted a version hold the same bits"
    MERGED_ONCE = "2: a contribution is in at most one commit"
    BOOKS = "2: merged + discarded + carried is what was done"
    REPLAY = "3: a commit is what its contributions make, to the last bit"
    BARRIER = "4: a barrier opens for all who wait, and not before all are there"
    ENDS = "5: every wait ends, by its event or by a stated error"
    COMPLETE = "6: what was offered is in a commit, or left out for a reason"
    ALIGNED = "6: after all have closed, everyone loads the same"
    ONE_LIFE = "7: a learner ID trains in one process"
    KEPT = "8: what is still needed is not deleted"
    GRACE = "a round waits its grace for those who train"
    SILENCE = "who was silent himself takes nobody for dead"
    ADOPT_FIRST = "at a step boundary a learner adopts first, then contributes"


class Violation(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: Invariant, text: str) -> None:
        super().__init__(f"[{invariant}] {text}")
        self.invariant = invariant
