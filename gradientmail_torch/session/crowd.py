"""Who is expected in a round, and into how many groups they fall: what delegates and syncers work out alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gradientmail_torch.algorithms.quorum import groups_ahead
from gradientmail_torch.session.observer import Peer

GROWN = 2
"""Where more than so many times as many train as were in the commit before, it says nothing of who will come."""


class Crowd(NamedTuple):
    members: frozenset[str]
    groups: int
    """0 where a syncer may well read all contributions itself."""


FLAT = Crowd(frozenset(), 0)
"""A round whose contributions are read one by one."""


def crowd(before: frozenset[str], peers: Mapping[str, Peer], learner_id: str, fan_in: int) -> Crowd:
    """The contributors to the commit ``before``, whom all know alike; in a first round, or where many have come since, all who train.

    Of those everyone sees a few more or less, so their groups are a power of two. Where a delegate and a syncer see another
    power all the same, the syncer passes over sums that are not within its groups, and reads their contributions.
    """
    usual, many = Crowd(before, groups_ahead(len(before), fan_in)), GROWN * max(len(before), fan_in)
    if len(peers) < many:
        return usual  # asked very often: who they are need not be looked at
    training = frozenset(i for i, peer in peers.items() if peer.live and peer.beat.state == "training") | {learner_id}
    if len(training) <= many:
        return usual
    return Crowd(training, 1 << (groups_ahead(len(training), fan_in) - 1).bit_length())
