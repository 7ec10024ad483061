"""Being alive, said by one object per party, and looked for by the others on their own clocks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gradientmail_torch import messages
from gradientmail_torch.clock import Clock, Task
from gradientmail_torch.errors import ConfigError, CorruptObject, GradientMailError
from gradientmail_torch.mailbox import Body, Mailbox
from gradientmail_torch.mailbox.watched_time import WatchedTime
from gradientmail_torch.patterns.beat_helper import Beat, BeatHelper

log = logging.getLogger(__name__)


class Heartbeat:
    """Beats for one party, whatever it holds, in one object at ``key``.

    The thread runs from the first :meth:`hold` to :meth:`close` and writes only while something is held, or when
    something was given up. A beat that fails is tried again at the next interval: the work goes on meanwhile.
    ``helper`` starts a process that repeats beats while this one is frozen.
    """

    def __init__(
        self, mailbox: Mailbox, key: str, *, interval: float, clock: Clock, helper: Callable[[], BeatHelper] | None = None
    ) -> None:
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
        self._start_helper = helper
        self._helper: BeatHelper | None = None

    def hold(self, nonce: str) -> int:
        """From now on every beat says that ``nonce`` is held. Returns the number of the newest beat that does not."""
        with self._lock:
            if self._stopping:
                raise ConfigError("nothing can be claimed any more: this party has been closed")
            self._held[nonce] = None
            count = self._count
            first, self._started = not self._started, True
        if first:
            self._helper = self._start_helper() if self._start_helper is not None else None
            task = self._clock.spawn(self._run, name=f"heartbeat {self._key}")
            with self._lock:
                self._task = task
        if self._helper is not None:
            with self._lock:
                beat = self._present()
            self._helper.tell(beat)
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
        if self._helper is not None:  # it would go on with the last beat
            self._helper.close()
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
            beat = self._present(ended=ended)
        if self._helper is not None and not ended:
            self._helper.tell(beat)
        try:
            self._mailbox.put(self._key, messages.encode(beat))
        except GradientMailError as error:  # at worst the work is taken over, and its outcome refused
            log.warning("no heartbeat at %r: %s", self._key, error)
            with self._lock:
                self._owed = True

    def _present(self, *, ended: bool = False) -> Beat:
        return Beat(count=self._count, holds=tuple(self._held), ended=ended, at=self._clock.wall())


class Attentive:
    """A mailbox that knows how long its user has been awake and online, by the requests that succeeded."""

    PAGE_KEYS = 1000
    GAPS_PER_LEASE = 4
    """So many answers at least make a lease of watching: one may be missing, and one beat, before anybody seems dead."""

    def __init__(self, inner: Mailbox, *, lease: float, clock: Clock) -> None:
        self.inner = inner
        self._watched = WatchedTime(clock, longest_gap=lease / self.GAPS_PER_LEASE)
        self._lock = threading.Lock()  # never held over a mailbox operation

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def watched_s(self) -> float:
        """Seconds of :class:`WatchedTime` until now."""
        with self._lock:
            return self._watched.asking()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        try:
            found = self.inner.get(key, start=start, length=length)
        except CorruptObject:  # the store has answered all the same
            self._succeeded()
            raise
        self._succeeded()
        return found

    def put(self, key: str, body: Body) -> None:
        self.inner.put(key, body)
        self._succeeded()

    def put_if_absent(self, key: str, body: Body) -> bool:
        created = self.inner.put_if_absent(key, body)
        self._succeeded()
        return created

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        for place, key in enumerate(self.inner.list(prefix, after=after)):
            if place % self.PAGE_KEYS == 0:
                self._succeeded()
            yield key

    def delete(self, key: str) -> None:
        self.inner.delete(key)
        self._succeeded()

    def _succeeded(self) -> None:
        with self._lock:
            self._watched.answered()


@dataclass(slots=True)
class Observation:
    """What an observer has seen of one heartbeat, by its :attr:`Attentive.watched_s`."""

    lease_s: float
    _last: bytes | None = None
    _unchanged_since: float | None = None
    _read_at: float = 0.0

    def see(self, beat: bytes | None, *, began: float, ended: float) -> None:
        """Take in ``beat``, read between the times ``began`` and ``ended``."""
        if self._unchanged_since is None or beat != self._last:
            self._unchanged_since = ended
        self._last, self._read_at = beat, began

    @property
    def stale(self) -> bool:
        """No new beat for a lease."""
        return self._unchanged_since is not None and self._read_at - self._unchanged_since >= self.lease_s


@dataclass(slots=True)
class _Party:
    """Another party, as seen from here."""

    observation: Observation
    beat: Beat | None = None
    read_at: float = 0.0
    """In watched time."""
    looked_at: float | None = None
    """On the clock."""


class Watch:
    """Looks at the heartbeats of others. Beats are untrusted: one that cannot be read counts by its changes alone.

    Args:
        mailbox: where the heartbeats are.
        attentive: what ``mailbox`` and the observer's other requests go through.
    """

    def __init__(self, mailbox: Mailbox, attentive: Attentive, *, lease: float, clock: Clock) -> None:
        self._mailbox = mailbox
        self._attentive = attentive
        self._lease = lease
        self._clock = clock
        self._lock = threading.Lock()  # never held over a mailbox operation
        self._parties: dict[str, _Party] = {}
        self._first_seen: dict[str, float] = {}

    def has_left(self, nonce: str, key: str, since: int) -> bool:
        """Whether the party that beats at ``key`` has given up claim ``nonce``, begun at its beat ``since``, or is dead.

        One GET, but seldom enough that many claims of one party cost one. A party that holds nothing need not beat,
        so that the lease counts from the first look at the claim.
        """
        party = self._look(key)
        with self._lock:
            claim_seen_for_s = party.read_at - self._first_seen.setdefault(nonce, party.read_at)
            silent = party.observation.stale and claim_seen_for_s >= self._lease
            return silent or (party.beat is not None and party.beat.gave_up(nonce, since))

    def _look(self, key: str) -> _Party:
        now = self._clock.monotonic()
        with self._lock:
            party = self._parties.setdefault(key, _Party(Observation(self._lease)))
            if party.looked_at is not None and now - party.looked_at < self._lease / 20:
                return party
        began = self._attentive.watched_s
        data = beat = None
        try:
            data = self._mailbox.get(key, length=messages.MAX_RECORD_BYTES)
            beat = None if data is None else messages.decode(Beat, data, key=key)
        except CorruptObject as error:  # in a signed run it may be a stranger's, which is as good as none
            log.warning("%s", error)
        with self._lock:
            party.observation.see(data, began=began, ended=self._attentive.watched_s)
            party.beat, party.read_at, party.looked_at = beat, began, now
        return party
