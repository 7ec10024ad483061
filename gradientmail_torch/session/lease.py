"""Leases: taking a learner ID, beating, and watching the others beat.

No two machines' clocks are compared. A life is over when its beat has not changed for ``lease`` seconds of
:class:`WatchedTime`, since a machine that was offline or suspended must not take its own silence for everyone's death.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from gradientmail_torch import keys
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, InvalidName, LearnerFenced, LearnerIdInUse
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.mailbox.watched_time import WatchedTime
from gradientmail_torch.messages import MAX_COUNT, MAX_SECONDS, Beat, Earlier, LifeRecord, encode, read
from gradientmail_torch.session.settings import BEATS_PER_LEASE, Settings

log = logging.getLogger(__name__)

OPERATIONS = ("get", "put", "list", "delete")
MOST_WITHOUT_BEAT = 8
"""Lives that may have ended before their first beat, one after the other, before the figures of those before count as lost."""


def machine() -> str:
    """Names this machine and its process table; empty where that cannot be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def process_ended(pid: int) -> bool:
    """Whether a process of this machine is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
    except OSError:
        return False


def take_generation(mailbox: Mailbox, learner_id: str, *, settings: Settings, clock: Clock) -> int:
    """Begin a new life of ``learner_id``; returns its generation.

    Raises :class:`LearnerIdInUse` when the newest life still beats. After a crash this waits until the old
    beat has been still for ``lease`` seconds, unless the old process is known to be gone from this machine.
    """
    generations = _generations(mailbox, learner_id)
    previous = _newest_life(mailbox, learner_id, generations)
    if previous is not None:
        _wait_until_silent(mailbox, learner_id, *previous, settings, clock)
    generation = max(generations, default=0) + 1
    life = LifeRecord(nonce=uuid4().hex, host=socket.gethostname(), machine=machine(), pid=os.getpid(), started_at=clock.wall())
    if not mailbox.put_if_absent(keys.learner(learner_id, generation), encode(life)):
        raise LearnerIdInUse(_in_use(learner_id, mailbox))
    return generation


class Inheritance(NamedTuple):
    """What the lives before have left."""

    figures: Earlier
    beats: tuple[str, ...]
    """Keys of theirs, to be removed once a beat of the new life holds the figures."""


def inherit(mailbox: Mailbox, life: keys.Life) -> Inheritance:
    """The figures of the newest earlier life that has beaten; of those between, which did not, there are none."""
    looked: list[str] = []
    for generation in range(life.generation - 1, max(0, life.generation - 1 - MOST_WITHOUT_BEAT), -1):
        looked.append(keys.beat(life.learner_id, generation))
        if (beat := _read_beat(mailbox, looked[-1])) is not None:
            return Inheritance(_with(beat.earlier, beat), tuple(looked))
    return Inheritance(Earlier(), tuple(looked))


def _with(earlier: Earlier, beat: Beat) -> Earlier:
    """``earlier`` and one life more. Bounded, as what is read is: it comes from a mailbox."""

    def total(a: int, b: int) -> int:
        return min(a + b, MAX_COUNT)

    return Earlier(
        lives=total(earlier.lives, 1),
        seconds=min(earlier.seconds + beat.seconds, MAX_SECONDS),  # infinity cannot be written
        requests={name: total(earlier.requests.get(name, 0), beat.requests.get(name, 0)) for name in OPERATIONS},
        bytes_up=total(earlier.bytes_up, beat.bytes_up),
        bytes_down=total(earlier.bytes_down, beat.bytes_down),
    )


def _generations(mailbox: Mailbox, learner_id: str) -> list[int]:
    found = []
    for key in mailbox.list(keys.learner_lives(learner_id)):
        with suppress(InvalidName):  # not ours
            found.append(keys.parse_life(key).generation)
    return sorted(found)


def _newest_life(mailbox: Mailbox, learner_id: str, generations: Sequence[int]) -> tuple[int, LifeRecord] | None:
    """The newest life that can be read; what cannot is no life, and only its number is taken."""
    for generation in reversed(generations):
        try:
            life = read(mailbox, LifeRecord, keys.learner(learner_id, generation))
        except CorruptObject as error:
            log.warning("no life of %s: %s", learner_id, error)
            continue
        if life is not None:
            return generation, life
    return None


def _wait_until_silent(mailbox: Mailbox, learner_id: str, generation: int, life: LifeRecord, settings: Settings, clock: Clock) -> None:
    if life.machine and life.machine == machine() and process_ended(life.pid):
        return
    key = keys.beat(learner_id, generation)
    first = _read_beat(mailbox, key)
    watched = WatchedTime(clock, longest_gap=settings.beat_interval)
    while first is None or first.state != "ended":
        clock.sleep(min(settings.longest_look, settings.beat_interval))
        beat = _read_beat(mailbox, key)
        if beat is not None and (first is None or beat.count != first.count):
            if beat.state == "ended":
                return
            raise LearnerIdInUse(_in_use(learner_id, mailbox))
        if watched.answered() >= settings.lease:
            return


def _read_beat(mailbox: Mailbox, key: str) -> Beat | None:
    try:
        return read(mailbox, Beat, key)
    except CorruptObject as error:
        log.warning("a heartbeat that cannot be read counts as silence: %s", error)
        return None


def _in_use(learner_id: str, mailbox: Mailbox) -> str:
    return f"learner_id {learner_id!r} is in use in {mailbox!r}: another process beats under it. Give each node an ID of its own"


class Heartbeat:
    """Publishes this life's beat, and sees whether a newer life has taken over."""

    def __init__(self, mailbox: Mailbox, life: keys.Life, *, interval: float, describe: Callable[[int], Beat]) -> None:
        """``describe`` gives the beat of a given count."""
        self._mailbox = mailbox
        self._life = life
        self._interval = interval
        self._describe = describe
        self._count = 0
        self._next_generation = life.generation + 1

    def tick(self) -> float:
        self.check_not_fenced()
        self._count += 1
        self._mailbox.put(keys.beat(*self._life), encode(self._describe(self._count)))
        return self._interval

    def check_not_fenced(self) -> None:
        """Raises :class:`LearnerFenced` when a newer life of this ID exists. What cannot be read is none."""
        newer: LifeRecord | None = None
        while newer is None:
            try:
                newer = read(self._mailbox, LifeRecord, keys.learner(self._life.learner_id, self._next_generation))
                if newer is None:
                    return
            except CorruptObject as error:
                log.warning("no newer life of %s, and it fences nobody: %s", self._life.learner_id, error)
                self._next_generation += 1
        raise LearnerFenced(
            f"a newer process has taken over learner_id {self._life.learner_id!r} in {self._mailbox!r}: this one stops. "
            "Was this machine suspended, or does another node have the same ID?"
        )


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
