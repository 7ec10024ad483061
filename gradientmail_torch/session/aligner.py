"""Brings new commits from the mailbox into memory, ready to be adopted at a step boundary."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.algorithms.algorithm import Pace
from gradientmail_torch.clock import Clock
from gradientmail_torch.messages import Commit
from gradientmail_torch.session.patience import Wait
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.run import Base, Run

ASKED_AT_EACH_LOOK = 8
"""Fragments whose next commit is asked for at each look. Where more are waited for, patience keeps the requests at about that."""


class Aligner:
    """Reading a commit that is known to come costs a twelfth of a listing, so the next version of a fragment
    with a contribution on its way is asked for by its key; otherwise hints from rounds and heartbeats decide.
    """

    def __init__(
        self,
        run: Run,
        replica: Replica,
        *,
        clock: Clock,
        pace: Callable[[], Pace],
        prepared: Callable[[], None],
        advanced: Callable[[Fragment], None],
    ) -> None:
        self._run = run
        self._replica = replica
        self._clock = clock
        self._pace = pace
        self._waits: dict[int, tuple[int, Wait]] = {}
        """By fragment: for which version, and since when."""
        self._prepared = prepared
        self._advanced = advanced

    def tick(self) -> float:
        fragments = self._replica.fragments
        many = sum(map(_is_recorded, fragments)) > ASKED_AT_EACH_LOOK
        for fragment in fragments:
            if fragment.hint > fragment.known or (_is_recorded(fragment) and (not many or self._is_time(fragment))):
                self._look(fragment)
            if self._replica.prepare(fragment):
                self._prepared()
        return self._pace().poll_interval

    def _is_time(self, fragment: Fragment) -> bool:
        """Whether to ask for the next version now. Slow rounds so cost little more than fast ones."""
        now, version = self._clock.monotonic(), fragment.known + 1
        waited_for, wait = self._waits.get(fragment.index, (0, None))
        if wait is None or waited_for != version:
            wait = Wait(now)
            self._waits[fragment.index] = version, wait
        return wait.is_time(now)

    def accept(self, fragment: Fragment, commit: Commit, values: list[Tensor]) -> None:
        """Take a commit whose values are in memory already: one that this learner has made."""
        self._stage(fragment, commit, values)
        if self._replica.prepare(fragment):
            self._prepared()

    def _look(self, fragment: Fragment) -> None:
        with self._replica.lock:
            base, hint = Base(fragment.known, fragment.newest_nonce(), fragment.newest_values()), fragment.hint
        commit = self._run.commit(fragment.index, base.version + 1)
        if commit is None:
            with self._replica.lock:
                if fragment.hint == hint:
                    fragment.hint = fragment.known  # what was said of a newer one was wrong
            return
        values = self._run.values(commit, base) if fragment.hint <= commit.version else None
        if values is None:  # it is behind by several versions, or so late that retention has passed it
            newest, values = self._run.newest(fragment.index, from_version=commit.version, base=base)
            commit = newest or commit
        self._stage(fragment, commit, values)

    def _stage(self, fragment: Fragment, commit: Commit, values: list[Tensor]) -> None:
        also: list[Commit] = []
        while not self._replica.stage(fragment, commit, values, also):
            # A version is being skipped whose round may hold our contribution: its commit decides what we keep.
            pending = fragment.pending
            if pending is not None:
                also.append(self._run.committed(fragment.index, pending.version))
        self._advanced(fragment)


def _is_recorded(fragment: Fragment) -> bool:
    """Whether a contribution of this learner is in a round, so that its commit is waited for."""
    pending = fragment.pending
    return pending is not None and pending.outcome is Outcome.OPEN and pending.version > 0
