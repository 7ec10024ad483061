"""One learner's replica of the model: what it has adopted, what it has contributed, what waits to be adopted.

The training thread calls :meth:`Replica.count`, :meth:`adopt` and :meth:`contribute` at step boundaries.
Background threads fetch, encode and prepare; what they hand over is taken at the next boundary. The lock guards
a few fields for a short time and is never held over arithmetic or the mailbox; tensors in the state are never
changed in place.

The books of a fragment: ``parameters = base + (delta of the contribution on its way) + (steps since)``. Adopting
a commit moves ``base``; the delta stays what it was, so that it may be offered round after round.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.adoption import Keep, Outcome, what_to_keep
from gradientmail_torch.algorithms.algorithm import Algorithm
from gradientmail_torch.messages import Commit, Contribution, TensorSpec
from gradientmail_torch.session.parameters import ParameterAccess, Snapshot, difference
from gradientmail_torch.session.run import INITIAL_NONCE

log = logging.getLogger(__name__)

MIX_SHARE = 0.5


@dataclass(slots=True)
class Work:
    """Steps and the samples behind them."""

    steps: int = 0
    samples: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.steps + other.steps, self.samples + other.samples)

    def __sub__(self, other: Work) -> Work:
        return Work(self.steps - other.steps, self.samples - other.samples)

    def one_step(self) -> Work:
        """Of mean size; of one sample where there are fewer of them than steps, since nobody may offer a step without any."""
        return Work(1, max(1, self.samples // self.steps))


@dataclass(slots=True, eq=False)
class Pending:
    """A contribution on its way into a commit."""

    nonce: str
    work: Work
    anchor: str
    snapshot: Snapshot | None
    """The parameters when it was taken; None once they have been encoded."""
    wire: str
    """The number format that it travels in."""
    sent: bytes | None = None
    """Exactly what the mailbox holds of it, or will: encoded anew, what is left of a lossy format would lose some more."""
    record: Contribution | None = None
    """Set when the data is in the mailbox."""
    version: int = 0
    """The version that its record's round leads to; 0 before a round has been chosen."""
    recorded: bool = False
    """Whether the record is known to be in that round, or that of an earlier life is."""
    outcome: Outcome = Outcome.OPEN
    reason: str = ""

    def delta(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """What others read of it: what the wire format lost stays local progress. Kept as bytes, which take less memory."""
        assert self.sent is not None
        return wire.decode(self.sent, specs, self.wire, key="a contribution of our own")


@dataclass(slots=True, eq=False)
class Staged:
    """A commit that is in memory, waiting for a step boundary."""

    version: int
    nonce: str
    values: list[Tensor]
    correction: list[Tensor] | None = None
    """By how much the parameters have to move, where they are rebased; None until it has been worked out."""
    prepared_for: object = None
    """The state that the correction was computed against; it is stale when the fragment's differs."""


@dataclass(slots=True, eq=False)
class Fragment:
    """A fragment's books. Fields are read and written under the replica's lock."""

    index: int
    specs: tuple[TensorSpec, ...]
    version: int
    nonce: str
    values: list[Tensor]
    """Committed values at ``version``."""
    base: list[Tensor]
    """What the device held of them right after adoption; for fp32 parameters the same tensors."""
    known: int
    """Newest version whose commit has been read; ``staged`` holds it when it is above ``version``."""
    due_at_step: int
    counted_from: Work = field(default_factory=Work)
    """The replica's total work when the last contribution was taken."""
    returned: Work = field(default_factory=Work)
    """Work of contributions that came back and is part of the next one."""
    adopted_at_step: int = 0
    pending: Pending | None = None
    staged: Staged | None = None
    called: bool = False
    hint: int = 0
    """Newest version that is said to exist."""
    recent: frozenset[str] = frozenset()
    """Learners that contributed to the newest known version."""
    reset: bool = False
    """The local parameters are unsound: take the committed values at the next boundary."""

    def state(self) -> tuple[int, str, Outcome | None]:
        """What a correction depends on."""
        return (self.version, self.pending.nonce if self.pending else "", self.pending.outcome if self.pending else None)

    def newest_nonce(self) -> str:
        return self.staged.nonce if self.staged else self.nonce

    def newest_values(self) -> list[Tensor]:
        return self.staged.values if self.staged else self.values


@dataclass(slots=True)
class Tally:
    """Sums since the session began, per learner. ``discarded`` and ``merged`` count a step once per fragment."""

    adopted: int = 0
    merged: int = 0
    """Contributions that are in a commit."""
    merged_work: Work = field(default_factory=Work)
    discarded_work: Work = field(default_factory=Work)
    rejected: int = 0
    stale_warnings: int = 0
    staleness_steps: int = 0
    """Own steps taken since the base of the oldest fragment, at the last boundary."""


class Replica:
    def __init__(self, access: ParameterAccess, algorithm: Algorithm, fragments: Sequence[Fragment]) -> None:
        self.fragments = list(fragments)
        self.lock = threading.Lock()
        self.tally = Tally()
        self.total = Work()
        self.learners = 1
        """Live learners in training, this one included; kept up by the session's observer."""
        self._access = access
        self._algorithm = algorithm
        self._wire: str = algorithm.wire

    # --- on the training thread ----------------------------------------------------------------------

    def count(self, steps: int, samples: int) -> None:
        self.total = self.total + Work(steps, samples)

    def uncontributed(self, fragment: Fragment) -> Work:
        """Work that is in no contribution yet."""
        return self.total - fragment.counted_from + fragment.returned

    def load(self) -> None:
        """Set the model to the fragments' committed values, as a joining learner does."""
        for fragment in self.fragments:
            fragment.base = self._access.write(fragment.index, fragment.values)

    def next_step_due(self) -> int:
        """The total of steps before which no fragment is due by steps alone, nor stale."""
        return min(self._next_step_due(fragment) for fragment in self.fragments)

    def _next_step_due(self, fragment: Fragment) -> int:
        if fragment.pending is None:
            return fragment.due_at_step
        stale_at = fragment.adopted_at_step + self._algorithm.max_staleness * self._algorithm.sync_every + 1
        return stale_at if stale_at > self.total.steps else 1 << 62  # it has been said

    def due(self, fragment: Fragment) -> bool:
        work = self.uncontributed(fragment)
        offered = work - self._held_back(work)
        if fragment.pending is not None or offered.steps < 1 or offered.samples < 1:
            return False
        if fragment.called and self._algorithm.calls:
            return True
        share = self._algorithm.samples_due(self.learners)
        return self.total.steps >= fragment.due_at_step if share is None else work.samples >= share

    def contribute(self, fragment: Fragment, nonce: str) -> None:
        """Take a snapshot of ``fragment`` and hand it to the publisher."""
        work = self.uncontributed(fragment)
        held_back = self._held_back(work)
        snapshot = self._access.snapshot(fragment.index)
        pending = Pending(nonce=nonce, work=work - held_back, anchor=fragment.nonce, snapshot=snapshot, wire=self._wire)
        with self.lock:
            fragment.pending = pending
            fragment.called = False
            fragment.counted_from = self.total - held_back
            fragment.returned = Work()
            fragment.due_at_step = self.total.steps + self._algorithm.sync_every

    def _held_back(self, work: Work) -> Work:
        """One step stands for what a sparse contribution leaves out, so that it is in the books until one takes it along."""
        return work.one_step() if self._wire == "sparse" and work.steps else Work()

    def hold_nothing_back(self) -> None:
        """This learner is leaving: what sparse contributions have left out goes with its last ones."""
        if self._wire == "sparse":
            self._wire = "bf16"

    def adopt(self, fragment: Fragment) -> bool:
        """Take what is staged for ``fragment``, when it is ready. True when the parameters have changed."""
        with self.lock:
            staged, pending, reset = fragment.staged, fragment.pending, fragment.reset
            # Kept from here on: the background may learn of the outcome while the parameters are being changed.
            outcome = pending.outcome if pending else None
            ready = staged is not None and staged.correction is not None and staged.prepared_for == fragment.state()
        if reset:
            self._restore(fragment)
            return True
        if staged is None or not ready:
            return False
        try:
            base = self._apply(fragment, staged, outcome)
        except BaseException:
            fragment.reset = True  # Ctrl-C in the middle: some tensors have moved and others have not
            raise
        with self.lock:
            if fragment.staged is staged:  # a newer one may have come meanwhile
                fragment.staged = None
            fragment.version, fragment.nonce, fragment.values, fragment.base = staged.version, staged.nonce, staged.values, base
            fragment.adopted_at_step = self.total.steps
            self.tally.adopted += 1
            if outcome not in (None, Outcome.OPEN):
                self._settle(fragment, outcome)
        return True

    def _apply(self, fragment: Fragment, staged: Staged, outcome: Outcome | None) -> list[Tensor]:
        """Change the parameters; returns the new base."""
        keep = what_to_keep(outcome)
        rule = self._algorithm.adoption_rule
        if keep is Keep.NONE or rule == "overwrite":
            self._drop_uncontributed(fragment)
            return self._access.write(fragment.index, staged.values)
        in_flight = outcome in (Outcome.OPEN, Outcome.RETRY)
        if not in_flight and not self.uncontributed(fragment).steps:
            return self._access.write(fragment.index, staged.values)  # nothing to keep: the exact values
        if rule == "mix":
            self._access.mix(fragment.index, staged.values, MIX_SHARE)
            return staged.values
        assert staged.correction is not None
        moved = self._access.shift(fragment.index, staged.correction)
        if all(by is None for by in moved):
            return staged.values
        return [v if by is None else v + (by - c) for v, by, c in zip(staged.values, moved, staged.correction, strict=True)]

    def _drop_uncontributed(self, fragment: Fragment) -> None:
        self.tally.discarded_work = self.tally.discarded_work + self.uncontributed(fragment)
        fragment.counted_from = self.total
        fragment.returned = Work()

    def _settle(self, fragment: Fragment, outcome: Outcome | None) -> None:
        """Close the books on the contribution, whose outcome is known. Called with the lock held."""
        pending, fragment.pending = fragment.pending, None
        if pending is None:
            return
        match outcome:
            case Outcome.MERGED:
                self.tally.merged += 1
                self.tally.merged_work = self.tally.merged_work + pending.work
            case Outcome.RETRY if self._algorithm.adoption_rule != "overwrite":
                fragment.returned = fragment.returned + pending.work
            case Outcome.RETRY | Outcome.REJECTED:  # what could be offered again has been overwritten
                self.tally.rejected += outcome is Outcome.REJECTED
                self.tally.discarded_work = self.tally.discarded_work + pending.work

    def _restore(self, fragment: Fragment) -> None:
        """Drop unsound local progress of a fragment, and its contribution."""
        self._drop_uncontributed(fragment)
        base = self._access.write(fragment.index, fragment.values)
        with self.lock:
            fragment.base = base
            fragment.reset = False
            self._settle(fragment, Outcome.REJECTED)

    def staleness_steps(self) -> int:
        """Own steps since the oldest adoption, of fragments that have something to adopt or on its way."""
        return max((self.total.steps - f.adopted_at_step for f in self.fragments if f.pending or f.staged), default=0)

    # --- in the background ---------------------------------------------------------------------------

    def stage(self, fragment: Fragment, commit: Commit, values: list[Tensor], also_read: Sequence[Commit] = ()) -> bool:
        """Hand over a commit for adoption, with the outcome of the contribution that it or ``also_read`` settles.

        False when the commit of a round that may hold this learner's contribution has not been read yet.
        """
        with self.lock:
            if commit.version <= fragment.known:
                return True
            pending = fragment.pending
            if pending is not None and pending.outcome is Outcome.OPEN:
                read = {c.version: c for c in (*also_read, commit)}
                if fragment.known < pending.version < commit.version and pending.version not in read:
                    return False
                for each in read.values():
                    note_outcome(pending, each)
            fragment.known = commit.version
            fragment.recent = contributors(commit)
            fragment.called = False
            fragment.hint = max(fragment.hint, commit.version)
            fragment.staged = Staged(commit.version, commit.nonce, values)
            return True

    def prepare(self, fragment: Fragment) -> bool:
        """Compute the correction of a staged commit against the present state. True when one became ready."""
        with self.lock:
            staged, pending, base, state = fragment.staged, fragment.pending, fragment.base, fragment.state()
            if staged is None or (staged.correction is not None and staged.prepared_for == state):
                return False
            if pending is not None and pending.sent is None:
                return False  # its snapshot has not been encoded; the publisher wakes us
        correction: list[Tensor] = []
        if self._algorithm.adoption_rule == "rebase":
            correction = difference(staged.values, base, fragment.specs)
            if pending is not None and state[2] is Outcome.MERGED:
                correction = difference(correction, pending.delta(fragment.specs), fragment.specs)
            correction = self._access.staged(correction)
        with self.lock:
            staged.correction, staged.prepared_for = correction, state
        return True

    def call(self, fragment: Fragment, version: int) -> bool:
        """Another learner has contributed to the round that leads to ``version``. True when that is news."""
        with self.lock:
            fragment.hint = max(fragment.hint, version - 1)
            if fragment.called or fragment.pending is not None or fragment.known + 1 != version:
                return False
            fragment.called = True
            return True


def note_outcome(pending: Pending, commit: Commit) -> None:
    """What ``commit`` says of a contribution, if it says anything. By nonce: an ID may have had other lives."""
    if any(merged.nonce == pending.nonce for merged in commit.merged):
        pending.outcome = Outcome.MERGED
        return
    for left_out in commit.left_out:
        if left_out.nonce == pending.nonce:
            pending.outcome = Outcome.RETRY if left_out.retry else Outcome.REJECTED
            pending.reason = left_out.reason
            log.warning(
                "fragment %d: %s left this learner's contribution of %d steps out of version %d: %s",
                commit.fragment, commit.by, pending.work.steps, commit.version, left_out.reason,
            )  # fmt: skip


def contributors(commit: Commit) -> frozenset[str]:
    return frozenset(merged.learner_id for merged in commit.merged)


def joined(index: int, specs: tuple[TensorSpec, ...], commit: Commit | None, values: list[Tensor], due_at_step: int) -> Fragment:
    """A fragment's books when a learner joins at ``commit``, None for the initial value."""
    version, nonce = (commit.version, commit.nonce) if commit is not None else (0, INITIAL_NONCE)
    return Fragment(
        index=index, specs=specs, version=version, nonce=nonce, values=values, base=values,
        known=version, due_at_step=due_at_step, hint=version, recent=contributors(commit) if commit is not None else frozenset(),
    )  # fmt: skip
