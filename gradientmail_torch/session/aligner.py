"""Brings new commits from the mailbox into memory, ready to be adopted at a step boundary."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.algorithms.algorithm import Pace
from gradientmail_torch.messages import Commit
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.run import Base, Run


class Aligner:
    """Reading a commit that is known to come costs a twelfth of a listing, so the next version of a fragment
    with a contribution on its way is asked for by its key; otherwise hints from rounds and heartbeats decide.
    """

    def __init__(
        self, run: Run, replica: Replica, *, pace: Callable[[], Pace], prepared: Callable[[], None], advanced: Callable[[Fragment], None]
    ) -> None:
        self._run = run
        self._replica = replica
        self._pace = pace
        self._prepared = prepared
        self._advanced = advanced

    def tick(self) -> float:
        for fragment in self._replica.fragments:
            pending = fragment.pending
            recorded = pending is not None and pending.outcome is Outcome.OPEN and pending.version > 0
            if recorded or fragment.hint > fragment.known:
                self._look(fragment)
            if self._replica.prepare(fragment):
                self._prepared()
        return self._pace().poll_interval

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
