"""Leaving a run: until everything a learner has done is in a commit, and no round is left open behind the last one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from uuid import uuid4

from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.algorithms.algorithm import Algorithm, Pace
from gradientmail_torch.clock import Clock, Reminder
from gradientmail_torch.session.engine import Engine
from gradientmail_torch.session.membership import Membership
from gradientmail_torch.session.replica import Replica

log = logging.getLogger(__name__)

REPORT_S = 10.0
"""Seconds of leaving after which it says what it waits for; and again whenever they have doubled."""


class Leaving:
    """Runs on the training thread, which has made its last step."""

    def __init__(
        self,
        replica: Replica,
        engine: Engine,
        membership: Membership,
        algorithm: Algorithm,
        *,
        exchange: Callable[[], None],
        changed: threading.Event,
        pace: Callable[[], Pace],
        clock: Clock,
    ) -> None:
        """``exchange`` adopts and contributes what is due; ``changed`` is set when there may be something to exchange."""
        self._replica = replica
        self._engine = engine
        self._membership = membership
        self._algorithm = algorithm
        self._exchange = exchange
        self._changed = changed
        self._pace = pace
        self._clock = clock
        self._reminder = Reminder(clock, REPORT_S)

    def finish(self, timeout: float, *, contribute: bool) -> str:
        """Contribute and adopt until nothing is left or time is up; returns what is missing, in words."""
        deadline = self._clock.monotonic() + timeout
        self._membership.state = "leaving"
        self._engine.wake("heartbeat")
        self._replica.hold_nothing_back()
        while True:
            if contribute:
                self._exchange()
                self._contribute_rest()
            else:
                self._engine.raise_failure()
            left = self._left(on_its_way_only=not contribute)
            if not left:
                break
            if self._clock.monotonic() >= deadline:
                return left
            self._remind(left)
            self._clock.wait(self._changed, max(0.0, min(deadline - self._clock.monotonic(), self._pace().poll_interval)))
            self._changed.clear()
        return self._commit_last_rounds(deadline)

    def _contribute_rest(self) -> None:
        for fragment in self._replica.fragments:
            if fragment.pending is None and fragment.staged is None and self._replica.uncontributed(fragment).steps:
                self._replica.contribute(fragment, uuid4().hex)
                self._engine.wake("publisher")

    def _left(self, *, on_its_way_only: bool) -> str:
        """What of this learner's work is in no commit yet."""
        for fragment in self._replica.fragments:
            steps = fragment.pending.work.steps if fragment.pending and fragment.pending.outcome is Outcome.OPEN else 0
            if not on_its_way_only:
                steps = self._replica.uncontributed(fragment).steps + (fragment.pending.work.steps if fragment.pending else 0)
            if steps:
                return f"{steps} steps of fragment {fragment.index}, which wait for version {fragment.known + 1}"
        return ""

    def _commit_last_rounds(self, deadline: float) -> str:
        """The last learners to leave see to it that no open round is left behind."""
        while True:
            # One after the other: who says that it leaves before it looks at the others' states cannot miss one
            # that does the same, so the last of any number knows that it is.
            for worker in ("heartbeat", "observer", "syncer"):
                ended = self._engine.next_tick(worker)
                while not ended():
                    if self._clock.monotonic() >= deadline:
                        return self._open_round()
                    self._engine.raise_failure()
                    self._remind(self._open_round())
                    self._clock.sleep(self._pace().poll_interval / 10)
            if self._membership.others("joining", "training", "waiting") or not self._engine.syncer.open_rounds:
                return ""

    def _open_round(self) -> str:
        if not self._engine.syncer.open_rounds:
            return "an answer of the mailbox"
        index, version = min(self._engine.syncer.open_rounds)
        return f"the commit of fragment {index}, version {version}, to which others have contributed"

    def _remind(self, left: str) -> None:
        if waited := self._reminder.due():
            log.warning(
                "%s is closing, and has waited %.0f s for %s (quorum: %d); %s",
                self._membership.life.learner_id, waited, left, self._algorithm.quorum, self._membership.who_is_there(),
            )  # fmt: skip
