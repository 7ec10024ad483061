"""Merges a round and commits what comes of it: the contributions, the outer optimizer's step, the data, the commit."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.algorithm import Algorithm
from gradientmail_torch.algorithms.merge import DirectionVanished, merge
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.messages import Commit, SummedAhead, encode, reference
from gradientmail_torch.session.closing_round import ClosingRound, Own
from gradientmail_torch.session.crowd import FLAT, Crowd
from gradientmail_torch.session.parameters import difference, total
from gradientmail_torch.session.partials import read_partials
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.retention import Retention
from gradientmail_torch.session.run import Base, Run, outer_specs


class Merger:
    def __init__(
        self,
        run: Run,
        replica: Replica,
        algorithm: Algorithm,
        retention: Retention,
        life: keys.Life,
        *,
        clock: Clock,
        committed: Callable[[Fragment, Commit, list[Tensor]], None],
        hinted: Callable[[], None],
    ) -> None:
        """``committed`` is told of each commit that this learner makes, with its values; ``hinted``, that another's exists."""
        self._run = run
        self._replica = replica
        self._algorithm = algorithm
        self._retention = retention
        self._life = life
        self._clock = clock
        self._committed = committed
        self._hinted = hinted
        self.seconds = 0.0
        """Moving average of the time that this learner takes to merge and commit a round."""

    def merge(self, fragment: Fragment, version: int, void: frozenset[str], expected: Crowd) -> frozenset[str]:
        """Merge and commit the round that leads to ``version``, of which the groups of those ``expected`` may have been summed ahead.

        Nothing is merged when contributors beyond ``void`` turn out to have left no sound record: without them the
        round may not have its quorum. They are returned.
        """
        began = self._clock.monotonic()
        with self._replica.lock:
            if fragment.known != version - 1:
                return frozenset()
            before, pending = Base(fragment.known, fragment.newest_nonce(), fragment.newest_values()), fragment.pending
        own = Own(pending.record, pending.sent) if pending and pending.record and pending.sent else None
        try:
            state = self._outer_state(fragment, version - 1)
        except CorruptObject:
            if self._run.commit(fragment.index, version) is not None:
                return frozenset()  # this learner slept: the round is long committed, and the state it needed is swept away
            raise
        ahead = self._algorithm.merge_method(max(1, len(expected.members)))
        partials = read_partials(self._run, fragment.index, version, expected.groups, ahead)
        closing = ClosingRound(self._run, fragment.index, version, before.values, own, partials=partials)
        found_void = frozenset(each.learner_id for each in closing.left_out.values())
        if not found_void <= void:
            return found_void
        method = ahead if closing.partials else self._algorithm.merge_method(max(1, len(closing.records)))
        try:
            merged = merge(closing.parts, fragment.specs, method)
        except DirectionVanished:
            return self.merge(fragment, version, void, FLAT)
        if not closing.merged and not closing.left_out:
            return frozenset()  # retention has removed its records: it is committed
        if closing.merged:
            values, state = self._algorithm.outer.step(before.values, merged, state, fragment.specs, version)
        else:
            values = before.values  # all were left out: the round closes unchanged, and says why
        self._publish(fragment, version, closing, method, before, values, state)
        taken = self._clock.monotonic() - began
        self.seconds = taken if self.seconds == 0 else 0.8 * self.seconds + 0.2 * taken
        return frozenset()

    def _outer_state(self, fragment: Fragment, version: int) -> list[Tensor] | None:
        if version == 0 or not self._algorithm.outer.stateful:
            return None
        return self._run.outer_state(self._run.committed(fragment.index, version))

    def _publish(
        self,
        fragment: Fragment,
        version: int,
        closing: ClosingRound,
        method: str,
        before: Base,
        values: list[Tensor],
        state: list[Tensor] | None,
    ) -> None:
        """Data first, then the commit. Whoever loses the race deletes its data after it has read the winner's."""
        nonce = uuid4().hex
        algorithm = self._algorithm
        update = parameters = whole = outer = None
        if algorithm.commit_wire != "fp32":
            change = difference(values, before.values, fragment.specs)
            update, change = self._run.publish(self._key(fragment, version, nonce, "update"), change, fragment.specs, algorithm.commit_wire)
            values = total(before.values, change, fragment.specs)
            del change  # the uploads that follow may take long
        where = self._key(fragment, version, nonce, "whole")
        if algorithm.commits_whole(version):
            parameters, _ = self._run.publish(where, values, fragment.specs, "fp32")
        else:
            whole = reference(where, wire.encode(values, fragment.specs, "fp32"), wire="fp32")
        if state is not None:
            outer, _ = self._run.publish(self._key(fragment, version, nonce, "outer"), state, outer_specs(fragment.specs), "fp32")
        commit = Commit(
            nonce=nonce,
            fragment=fragment.index,
            version=version,
            by=self._life.learner_id,
            generation=self._life.generation,
            after=before.nonce,
            update=update,
            parameters=parameters,
            whole=whole,
            outer=outer,
            method=method,
            merged=tuple(closing.merged.values()),
            ahead=tuple(SummedAhead(contributions=len(each.merged), by=each.by, data=each.data) for each in closing.partials),
            left_out=tuple(closing.left_out.values()),
            at=self._clock.wall(),
        )
        if self._run.mailbox.put_if_absent(keys.commit(fragment.index, version), encode(commit)):
            self._committed(fragment, commit, values)
            self._retention.after_commit(fragment.index, version, sorted({*closing.settled, *closing.records, *closing.left_out}))
            return
        winner = self._run.commit(fragment.index, version)
        if winner is not None and winner.nonce != nonce:
            for ref in (update, parameters, outer):
                if ref is not None:
                    self._run.mailbox.delete(ref.key)
        with self._replica.lock:
            fragment.hint = max(fragment.hint, version)
        self._hinted()

    def _key(self, fragment: Fragment, version: int, nonce: str, part: str) -> str:
        return keys.data(fragment.index, version, self._life.learner_id, nonce, part)
