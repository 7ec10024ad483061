"""Being alive, said by one object per party, and looked for by the others on their own clocks."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from gradientmail_torch import messages
from gradientmail_torch.clock import Clock, Task
from gradientmail_torch.errors import ConfigError, CorruptObject, GradientMailError
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Count, Nonce, Record

log = logging.getLogger(__name__)


class Beat(Record, frozen=True):
    """A heartbeat of a party, overwritten by that party alone."""

    count: Count
    holds: tuple[Nonce, ...]
    """Nonces of the claims that the party works on."""
    ended: bool = False
    at: float = 0.0
    """Seconds since 1970 by the party's clock; for people."""

    def gave_up(self, nonce: str, since: int) -> bool:
        """Whether the party no longer holds claim ``nonce``, which it began when its newest beat was ``since``."""
        return self.ended or (self.count > since and nonce not in self.holds)


class Heartbeat:
    """Beats for one party, whatever it holds, in one object at ``key``.

    The thread runs from the first :meth:`hold` to :meth:`close` and writes only while something is held, or when
    something was given up. A beat that fails is tried again at the next interval: the work goes on meanwhile.
    """

    def __init__(self, mailbox: Mailbox, key: str, *, interval: float, clock: Clock) -> None:
        self._mailbox = mailbox
        self._key = key
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()  # never held over a mailbox operation
        self._wake = threading.Event()
        self._held: dict[str, None] = {}  # a set in order
        self._count = 0
        self._owed = False  # something was given up, and no beat has said so yet
        self._started = False
        self._stopping = False
        self._task: Task | None = None

    def hold(self, nonce: str) -> int:
        """From now on every beat says that ``nonce`` is held. Returns the number of the newest beat that does not."""
        with self._lock:
            if self._stopping:
                raise ConfigError("nothing can be claimed any more: this party has been closed")
            self._held[nonce] = None
            count = self._count
            first, self._started = not self._started, True
        if first:
            task = self._clock.spawn(self._run, name=f"heartbeat {self._key}")
            with self._lock:
                self._task = task
        return count

    def drop(self, nonce: str, *, tell: bool) -> None:
        """``nonce`` is no longer held; ``tell``: say so at once, for others to take it."""
        with self._lock:
            if nonce not in self._held:
                return
            del self._held[nonce]
            if not tell:
                return
            self._owed = True
        self._wake.set()

    def holds(self, nonce: str) -> bool:
        with self._lock:
            return nonce in self._held

    def close(self) -> None:
        """Give everything up, say so if there was anything, and end the thread. Idempotent."""
        with self._lock:
            self._stopping = True
            unsaid = bool(self._held) or self._owed
            self._held.clear()
            task, self._task = self._task, None
        if task is None:
            return
        self._wake.set()
        task.join()
        if unsaid:
            self._beat(ended=True)

    def _run(self) -> None:
        while True:
            self._clock.wait(self._wake, self._interval)
            self._wake.clear()
            with self._lock:
                if self._stopping:
                    return
                due = bool(self._held) or self._owed
            if due:
                self._beat()

    def _beat(self, *, ended: bool = False) -> None:
        with self._lock:
            self._count += 1
            self._owed = False
            beat = Beat(count=self._count, holds=tuple(self._held), ended=ended, at=self._clock.wall())
        try:
            self._mailbox.put(self._key, messages.encode(beat))
        except GradientMailError as error:  # at worst the work is taken over, and its outcome refused
            log.warning("no heartbeat at %r: %s", self._key, error)
            with self._lock:
                self._owed = True


@dataclass(slots=True)
class Observation:
    """What an observer has seen of one heartbeat, on its own monotonic clock."""

    lease_s: float
    _last: bytes | None = None
    _unchanged_since: float | None = None
    _read_at: float = 0.0

    def see(self, beat: bytes | None, *, began: float, ended: float) -> None:
        """Take in ``beat``, read between the times ``began`` and ``ended``."""
        away = began - self._read_at > self.lease_s / 3  # our own silence is not the other's
        if self._unchanged_since is None or away or beat != self._last:
            self._unchanged_since = ended
        self._last, self._read_at = beat, began

    @property
    def stale(self) -> bool:
        """No new beat for a lease, counted over the times at which it was looked for."""
        return self._unchanged_since is not None and self._read_at - self._unchanged_since >= self.lease_s


@dataclass(slots=True)
class Seen:
    """Another party, as seen from here."""

    observation: Observation
    beat: Beat | None = None
    read_at: float | None = None

    @property
    def stale(self) -> bool:
        return self.observation.stale


class Watch:
    """Looks at the heartbeats of others. Beats are untrusted: one that cannot be read counts by its changes alone."""

    def __init__(self, mailbox: Mailbox, *, lease: float, clock: Clock) -> None:
        self._mailbox = mailbox
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()  # never held over a mailbox operation
        self._seen: dict[str, Seen] = {}

    def look(self, key: str) -> Seen:
        """The party that beats at ``key``: one GET, but seldom enough that many items of one party cost one."""
        began = self._clock.monotonic()
        with self._lock:
            seen = self._seen.setdefault(key, Seen(Observation(self._lease)))
            if seen.read_at is not None and began - seen.read_at < self._lease / 20:
                return seen
        data = self._mailbox.get(key, length=messages.MAX_RECORD_BYTES)
        ended = self._clock.monotonic()
        try:
            beat = None if data is None else messages.decode(Beat, data, key=key)
        except CorruptObject as error:
            log.warning("%s", error)
            beat = None
        with self._lock:
            seen.observation.see(data, began=began, ended=ended)
            seen.beat, seen.read_at = beat, began
        return seen
