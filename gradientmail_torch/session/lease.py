"""Leases: taking a learner ID, and beating under it; :mod:`.observer` watches the others beat.

No two machines' clocks are compared. A life is over when its beat has not changed for ``lease`` seconds of
:class:`WatchedTime`, since a machine that was offline or suspended must not take its own silence for everyone's death.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from gradientmail_torch import keys
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, InvalidName, LearnerFenced, LearnerIdInUse
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.mailbox.watched_time import WatchedTime
from gradientmail_torch.messages import MAX_COUNT, MAX_SECONDS, Beat, Earlier, LifeRecord, encode, read
from gradientmail_torch.session.settings import Settings

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
        seconds=min(earlier.seconds + beat.seconds, MAX_SECONDS),
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
