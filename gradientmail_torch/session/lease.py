"""Leases: taking a learner ID, beating, and watching the others beat.

No two machines' clocks are compared. A life is over when its beat has not changed for ``lease`` seconds of
successful observation on the observer's own clock; after a gap in the observer's own reads that time starts
afresh, since a machine that was offline or suspended must not take its own silence for everyone's death.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from gradientmail_torch import keys
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, InvalidName, LearnerFenced, LearnerIdInUse
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Beat, LifeRecord, encode, read
from gradientmail_torch.session.settings import Settings

log = logging.getLogger(__name__)


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
    generation = 0
    for key in mailbox.list(keys.learner_lives(learner_id)):
        generation = keys.parse_life(key).generation
    if generation:
        _wait_until_silent(mailbox, learner_id, generation, settings, clock)
    life = LifeRecord(nonce=uuid4().hex, host=socket.gethostname(), machine=machine(), pid=os.getpid(), started_at=clock.wall())
    if not mailbox.put_if_absent(keys.learner(learner_id, generation + 1), encode(life)):
        raise LearnerIdInUse(_in_use(learner_id, mailbox))
    if generation:
        mailbox.delete(keys.beat(learner_id, generation))
    return generation + 1


def _wait_until_silent(mailbox: Mailbox, learner_id: str, generation: int, settings: Settings, clock: Clock) -> None:
    life = read(mailbox, LifeRecord, keys.learner(learner_id, generation))
    if life is not None and life.machine and life.machine == machine() and process_ended(life.pid):
        return
    key = keys.beat(learner_id, generation)
    first = read(mailbox, Beat, key)
    since = clock.monotonic()
    while first is None or first.state != "ended":
        clock.sleep(min(settings.poll_interval, settings.beat_interval))
        beat = read(mailbox, Beat, key)
        if beat is not None and (first is None or beat.count != first.count):
            if beat.state == "ended":
                return
            raise LearnerIdInUse(_in_use(learner_id, mailbox))
        if clock.monotonic() - since >= settings.lease:
            return


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

    def tick(self) -> float:
        self.check_not_fenced()
        self._count += 1
        self._mailbox.put(keys.beat(*self._life), encode(self._describe(self._count)))
        return self._interval

    def check_not_fenced(self) -> None:
        """Raises :class:`LearnerFenced` when a newer life of this ID exists."""
        if self._mailbox.get(keys.learner(self._life.learner_id, self._life.generation + 1), length=1) is not None:
            raise LearnerFenced(
                f"a newer process has taken over learner_id {self._life.learner_id!r} in {self._mailbox!r}: this one stops. "
                "Was this machine suspended, or does another node have the same ID?"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another life as last observed."""

    learner_id: str
    generation: int
    beat: Beat
    live: bool


class Observer:
    """Watches the beats of all learners."""

    STILL_CHECK_EVERY = 5
    """Lives that have been found dead are read only at every so many observations."""

    def __init__(self, mailbox: Mailbox, *, lease: float, clock: Clock) -> None:
        self._mailbox = mailbox
        self._lease = lease
        self._clock = clock
        self._seen: dict[keys.Life, tuple[Beat, float]] = {}
        self._ended: set[keys.Life] = set()
        self._observed_at: float | None = None
        self._observations = 0

    def observe(self) -> dict[str, Peer]:
        """The newest life of each learner ID that has not ended."""
        newest: dict[str, int] = {}
        for key in self._mailbox.list(keys.BEATS):
            try:
                life = keys.parse_life(key)
            except InvalidName:
                continue  # not ours
            newest[life.learner_id] = max(life.generation, newest.get(life.learner_id, 0))
        self._observations += 1
        began = self._clock.monotonic()
        if self._observed_at is not None and began - self._observed_at > self._lease / 3:
            self._seen = {life: (beat, began) for life, (beat, _) in self._seen.items()}
        lives = [keys.Life(learner_id, generation) for learner_id, generation in newest.items()]
        for life in lives:
            self._look(life)
        self._observed_at = self._clock.monotonic()
        return {life.learner_id: self._peer(life) for life in lives if life in self._seen and life not in self._ended}

    def _look(self, life: keys.Life) -> None:
        known = self._seen.get(life)
        dead = known is not None and self._clock.monotonic() - known[1] >= self._lease
        if life in self._ended or (dead and self._observations % self.STILL_CHECK_EVERY):
            return
        try:
            beat = read(self._mailbox, Beat, keys.beat(*life))
        except CorruptObject as error:
            log.warning("learner %s: its heartbeat cannot be read, so it counts as silent: %s", life.learner_id, error)
            return
        if beat is None:
            return
        if beat.state == "ended":
            self._ended.add(life)
        if known is None or known[0].count != beat.count or known[0].state != beat.state:
            self._seen[life] = (beat, self._clock.monotonic())

    def _peer(self, life: keys.Life) -> Peer:
        beat, since = self._seen[life]
        live = self._clock.monotonic() - since < self._lease
        return Peer(learner_id=life.learner_id, generation=life.generation, beat=beat, live=live)
