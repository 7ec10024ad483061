"""Sums the contributions of groups ahead of a merge, where a round has more than one learner should read.

Without this the syncer of a fragment reads all N contributions of a round. Where more than ``fan_in`` are expected
(:mod:`.crowd`), learners fall into groups of about that many, by a hash of their IDs, which all compute alike. One of
each group reads the others' contributions and leaves their weighted sum. The syncer reads the sums, and by themselves
those contributions that are in none, so a delegate that dies or sleeps costs no more than the reading of its group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from uuid import uuid4

from gradientmail_torch import keys
from gradientmail_torch.algorithms.algorithm import Algorithm
from gradientmail_torch.algorithms.merge import Method, Sums, summed
from gradientmail_torch.algorithms.quorum import delegate_order, group_of
from gradientmail_torch.messages import Partial, encode
from gradientmail_torch.session.closing_round import ClosingRound, Own
from gradientmail_torch.session.crowd import FLAT, Crowd, crowd
from gradientmail_torch.session.observer import Peer
from gradientmail_torch.session.partials import delegate_of, read_partial, uplinks
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.run import Run

GRACE_SHARE = 0.5
"""A group waits for its members for this part of the round's grace, so that the sum is there when the round closes."""
LOOKING = 2
"""Members of a group that look who has contributed where not all do: the first in the order may not have. As many more
join them in each lease that passes."""


class Delegate:
    """Sums its group's contributions when that falls to it."""

    def __init__(self, run: Run, replica: Replica, algorithm: Algorithm, life: keys.Life) -> None:
        self._run = run
        self._replica = replica
        self._algorithm = algorithm
        self._life = life
        self._done: dict[int, int] = {}
        """By fragment, the newest version whose group this learner has seen to."""
        self._places: dict[int, tuple[int, int]] = {}
        """By fragment, a version and this learner's place for it, since finding it takes a while."""

    def consider(
        self, fragment: Fragment, version: int, contributors: frozenset[str], peers: Mapping[str, Peer], *, waited_enough: bool
    ) -> bool:
        """Sum up this learner's group of the round that leads to ``version``, if it is time and its turn.

        It is time when all of the group that may come are in the round, or it has ``waited_enough``. True when
        something was done, so that what is known of the round is old.
        """
        expected, groups = self._crowd(fragment, version, peers)
        if not groups or self._life.learner_id not in contributors or self._done.get(fragment.index, 0) >= version:
            return False
        run = self._run.manifest.nonce
        group = group_of(run, self._life.learner_id, groups)
        members = frozenset(i for i in contributors if group_of(run, i, groups) == group)
        if len(members) < 2 or not (waited_enough or self._of_group(expected, group, groups, peers) <= members):
            return False
        if delegate_of(self._run, fragment.index, version, members, peers) != self._life.learner_id:
            return False
        self._sum_up(fragment, version, group, members, self._algorithm.merge_method(len(expected)))
        self._done[fragment.index] = version  # not where the mailbox was away: then all would wait for sums that never come
        return True

    def place(self, fragment: Fragment, version: int, peers: Mapping[str, Peer]) -> int | None:
        """This learner's place among those of its group who may be in the round, or None where nothing is to be summed up.

        It goes by who is expected when this is first asked for.
        """
        everyone, groups = self._crowd(fragment, version, peers)
        if not groups or self._done.get(fragment.index, 0) >= version:
            return None
        of_version, place = self._places.get(fragment.index, (0, 0))
        if of_version != version:
            run, me = self._run.manifest.nonce, self._life.learner_id
            expected = self._of_group(everyone, group_of(run, me, groups), groups, peers) | {me}
            place = delegate_order(run, fragment.index, version, uplinks(expected, peers)).index(me)
            self._places[fragment.index] = version, place
        return place

    def _crowd(self, fragment: Fragment, version: int, peers: Mapping[str, Peer]) -> Crowd:
        with self._replica.lock:
            if fragment.known != version - 1:
                return FLAT
            before = fragment.recent
        return crowd(before, peers, self._life.learner_id, self._algorithm.fan_in)

    def _of_group(self, expected: Collection[str], group: int, groups: int, peers: Mapping[str, Peer]) -> set[str]:
        """Members of a group that may contribute, as far as one knows."""
        run = self._run.manifest.nonce
        return {i for i in expected if _may_come(peers.get(i)) and group_of(run, i, groups) == group}

    def _sum_up(self, fragment: Fragment, version: int, group: int, members: Collection[str], method: Method) -> None:
        key = keys.partial(fragment.index, version, group)
        with self._replica.lock:
            if fragment.known != version - 1:
                return
            before, pending = fragment.newest_values(), fragment.pending
        if self._run.mailbox.get(key, length=0) is not None:
            return
        own = Own(pending.record, pending.sent) if pending and pending.record and pending.sent else None
        closing = ClosingRound(self._run, fragment.index, version, before, own, members=members)
        sums = summed(closing.contributions(), fragment.specs, method)
        if not closing.merged:
            return
        # Also where only one is sound: whoever merges waits for what it has been told of.
        self._publish(key, fragment, version, group, closing, method, sums)

    def _publish(self, key: str, fragment: Fragment, version: int, group: int, closing: ClosingRound, method: Method, sums: Sums) -> None:
        """Data first, then the record. Whoever loses the race deletes its data after it has read the winner's record."""
        nonce = uuid4().hex
        where = keys.data(fragment.index, version, self._life.learner_id, nonce, "partial")
        data, _ = self._run.publish(where, sums.tensors, fragment.specs, "fp32")
        record = Partial(
            nonce=nonce,
            fragment=fragment.index,
            version=version,
            group=group,
            by=self._life.learner_id,
            generation=self._life.generation,
            method=method,
            merged=tuple(closing.merged.values()),
            left_out=tuple(closing.left_out.values()),
            radii=tuple(sums.radii),
            data=data,
        )
        if self._run.mailbox.put_if_absent(key, encode(record)):
            return
        winner = read_partial(self._run, key)
        if winner is not None and winner.nonce != nonce:
            self._run.mailbox.delete(where)


def _may_come(peer: Peer | None) -> bool:
    """Whether a learner that is expected may still come; one that is not watched may."""
    return peer is None or (peer.live and peer.beat.state == "training")
