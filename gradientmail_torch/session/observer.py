"""Watching the other learners beat: who is there, in what state, and who has fallen silent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

from gradientmail_torch import keys
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, InvalidName
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.mailbox.watched_time import WatchedTime
from gradientmail_torch.messages import Beat, read
from gradientmail_torch.session.settings import BEATS_PER_LEASE

log = logging.getLogger(__name__)

UNREAD = Beat(count=0, state="training")
"""Stands for the beat of a life that is listed and has not been read yet."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another life as last observed."""

    learner_id: str
    generation: int
    beat: Beat
    live: bool


@dataclass(slots=True)
class _Sighting:
    beat: Beat
    since: float
    """When this beat was first seen, in watched time."""
    read_at: float
    """When it was last seen unchanged."""


class Observer:
    """Watches the beats of all learners, at most ``WATCHED`` of them at each observation.

    In a larger run they take turns, so that what a node spends on watching does not grow with the run; a death is
    then noticed later. With more than ``EXPECTED``, rounds do without the dead for another reason until it is
    (:meth:`Syncer` expects only those that have contributed to the round before).
    """

    WATCHED = 16
    """A beat interval's reads: a fifth of what a node pays for its requests at default settings."""
    EXPECTED = 64
    """Of more, a death is noticed too late for a round to wait for all who seem to live."""
    LISTED_EVERY = 8
    """With more learners than that, new ones are looked for at every so many observations, or once in a turn."""
    STILL_CHECK_EVERY = 5
    """Lives that have been found dead are read only at every so many observations."""
    MOST_LISTED = 500
    GONE_LEASES = 20
    """Where more are listed, the beats of lives that have been gone for so many leases are removed: a run on nodes that
    come and go under new names would be listed at ever greater cost."""

    def __init__(self, mailbox: Mailbox, *, lease: float, clock: Clock) -> None:
        self._mailbox = mailbox
        self._lease = lease
        self._watched = WatchedTime(clock, longest_gap=lease / BEATS_PER_LEASE)
        self._seen: dict[keys.Life, _Sighting] = {}
        self._ended: set[keys.Life] = set()
        self._unreadable: set[keys.Life] = set()
        self._listed: set[keys.Life] = set()
        self._observations = 0
        self.peers: Mapping[str, Peer] = {}
        """The newest life of each learner ID that has not ended, as last seen."""
        self.versions: list[int] = []
        """The newest version of each fragment that any beat has named."""
        self.sampled = False
        """Whether there are so many learners that a death is noticed late."""
        self._by_turns = False

    def observe(self) -> Mapping[str, Peer]:
        """Look at those whose turn it is; returns :attr:`peers`, in which each is seen as soon as its beat has been read.

        Those whose turn to be read has not come yet are taken to be alive, or a newcomer to a large run would think
        itself among few, and merge what is others' to merge.
        """
        turns = -(-len(self._listed) // self.WATCHED)
        if not self._by_turns or self._observations % min(turns, self.LISTED_EVERY) == 0:
            self._listed = self._list_lives()
        listed = self._listed
        self._observations += 1
        if self._observations % self.STILL_CHECK_EVERY == 0:
            self._unreadable.clear()
        self._watched.answered()
        for life in self._turn(_newest(listed - self._unreadable)):
            self._look(life)
            self._show(life)
        self._forget_all_but(listed)
        if len(listed) > self.MOST_LISTED:
            self._remove_the_gone(len(listed) - self.MOST_LISTED)
        peers = {life.learner_id: self._peer(life) for life in _newest(self._seen) if life not in self._ended}
        if self._by_turns:
            unread = listed - self._seen.keys() - self._ended - self._unreadable
            peers |= {life.learner_id: Peer(*life, UNREAD, live=True) for life in _newest(listed) if life in unread}
        self.peers = peers
        return peers

    def _show(self, life: keys.Life) -> None:
        """At once: what is read next may hang, and until then a learner that trains would seem to be joining."""
        seen = {life.learner_id: self._peer(life)} if life in self._seen and life not in self._ended else {}
        self.peers = {learner_id: peer for learner_id, peer in self.peers.items() if learner_id != life.learner_id} | seen

    def _list_lives(self) -> set[keys.Life]:
        found = set()
        for key in self._mailbox.list(keys.BEATS):
            with suppress(InvalidName):  # not ours
                found.add(keys.parse_life(key))
        return found

    def _forget_all_but(self, listed: set[keys.Life]) -> None:
        self._seen = {life: sighting for life, sighting in self._seen.items() if life in listed}
        self._ended &= listed

    def _remove_the_gone(self, count: int) -> None:
        """Those that have been gone for longest; one that wakes all the same beats anew."""
        latest = self._watched.answered() - self.GONE_LEASES * self._lease
        gone = [(sighting.since, life) for life, sighting in self._seen.items() if life in self._ended or not self._lives(sighting)]
        for since, life in sorted(gone)[:count]:
            if since <= latest:
                self._mailbox.delete(keys.beat(*life))

    def _turn(self, lives: list[keys.Life]) -> list[keys.Life]:
        """Those whose beats are read now; the dead seldom, and the ended never again."""
        lives = [life for life in lives if life not in self._ended]
        still = {life for life in lives if life in self._seen and not self._lives(self._seen[life])}
        living = [life for life in lives if life not in still]
        self._by_turns, self.sampled = len(living) > self.WATCHED, len(living) > self.EXPECTED
        chosen = self._some_of(living)
        if self._observations % self.STILL_CHECK_EVERY == 0:
            chosen += self._some_of([life for life in lives if life in still])
        return chosen

    def _some_of(self, lives: list[keys.Life]) -> list[keys.Life]:
        """All, or where there are more than can be watched at once, those whose turn it is."""
        if len(lives) <= self.WATCHED:
            return lives
        begin = self._observations * self.WATCHED % len(lives)
        return (lives + lives)[begin : begin + self.WATCHED]

    def _look(self, life: keys.Life) -> None:
        known = self._seen.get(life)
        try:
            beat = read(self._mailbox, Beat, keys.beat(*life))
        except CorruptObject as error:
            log.warning("learner %s: its heartbeat cannot be read, so it counts as silent: %s", life.learner_id, error)
            if known is None:  # no life at all, or one whose next beat will show it
                self._unreadable.add(life)
                return
            beat = known.beat
        now = self._watched.answered()
        if beat is None:
            return
        if beat.state == "ended":
            self._ended.add(life)
        if known is None or (known.beat.count, known.beat.state) != (beat.count, beat.state):
            self._seen[life] = _Sighting(beat, now, now)
            self.versions = [max(pair) for pair in zip_longest(self.versions, beat.versions, fillvalue=0)]
        else:
            known.read_at = now

    def _lives(self, sighting: _Sighting) -> bool:
        return sighting.read_at - sighting.since < self._lease

    def _peer(self, life: keys.Life) -> Peer:
        sighting = self._seen[life]
        return Peer(*life, sighting.beat, live=self._lives(sighting))


def _newest(lives: Iterable[keys.Life]) -> list[keys.Life]:
    """The newest life of each learner ID."""
    return list({life.learner_id: life for life in sorted(lives)}.values())
