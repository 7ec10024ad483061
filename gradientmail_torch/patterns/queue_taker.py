"""Taking items from a Shared Queue and settling them."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Literal

from gradientmail_torch import messages
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import WorkFenced
from gradientmail_torch.keys import QueueKeys, last_segment
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Count, Nonce, Record
from gradientmail_torch.patterns.leased_work import Claim, LeasedWork, Outcome
from gradientmail_torch.patterns.queue_cursor import Cursor
from gradientmail_torch.patterns.queue_items import Items
from gradientmail_torch.presence import waiting

log = logging.getLogger(__name__)

_FEW = 16
_END: Literal["end"] = "end"
_MAX_ERROR_CHARS = 20_000


class GivenUp(Record, frozen=True):
    """Why an attempt at an item came to nothing."""

    nonce: Nonce
    attempt: Count
    owner: str
    error: str


class Task:
    """An item that this node holds, until it is settled: by :meth:`done`, :meth:`requeue` or :meth:`release`."""

    def __init__(self, taker: Taker, claim: Claim, place: int, value: object) -> None:
        self.value = value
        self.place = place
        """Its place in the queue, from 0."""
        self.attempt = claim.attempt
        """Counts from 1: a fencing token for whatever is written elsewhere."""
        self.settled = False
        self._taker = taker
        self._claim = claim

    def __repr__(self) -> str:
        return f"Task({self.value!r}, place={self.place}, attempt={self.attempt})"

    def done(self, result: object = None) -> None:
        """Count the item done, with a small JSON ``result`` for whoever reads the outcomes.

        Raises :class:`~gradientmail_torch.errors.WorkFenced` when another node took it over and finished first.
        """
        self.settled = True
        self._taker.finish(self._claim, result)

    def requeue(self, error: BaseException | str) -> None:
        """Give the item back because of ``error``; after ``max_attempts`` it is given up for good."""
        self.settled = True
        text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
        self._taker.give_up(self._claim, messages.writable(text[-_MAX_ERROR_CHARS:]))

    def release(self) -> None:
        """Give the item back, for others to take at once."""
        self.settled = True
        self._taker.release(self._claim)


class Taker:
    """Takes items for one node. One thread takes; tasks may be settled by any. A context manager.

    Leaving it gives back what is not settled, so that the other nodes need not wait for the lease.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        keys: QueueKeys,
        work: LeasedWork,
        cursor: Cursor,
        items: Items,
        *,
        drain: bool,
        poll_interval: float,
        max_attempts: int,
        learner_id: str,
        stop: threading.Event,
        clock: Clock,
    ) -> None:
        self._ended = False
        self._learner_id = learner_id
        self._run = repr(mailbox)
        self._mailbox = mailbox
        self._keys = keys
        self._work = work
        self._cursor = cursor
        self._items = items
        self._drain = drain
        self._poll_interval = poll_interval
        self._max_attempts = max_attempts
        self._stop = stop
        self._clock = clock
        self._held: dict[str, Claim] = {}
        self._lock = threading.Lock()  # never held over a mailbox operation
        self._claims = self._search()

    def __enter__(self) -> Taker:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._work.close()

    @property
    def finished(self) -> bool:
        """Nothing more will be taken: all is done, or ``stop`` was called."""
        return self._ended or self._stop.is_set()

    def take(self, timeout: float | None = None) -> Task | None:
        """The next item. Where there is none to be had now, wait for those of others, to take over a dead node's.

        None at the end, which :attr:`finished` tells; after ``timeout`` seconds; after ``stop``; and when all that is
        left is held by this taker: settle it and ask again. The learner counts as waiting meanwhile, as at a barrier.
        """
        began = self._clock.monotonic()
        while not self._stop.is_set():
            match self._next():
                case Claim() as claim:
                    with self._lock:
                        self._held[claim.item] = claim
                    if claim.attempt <= self._max_attempts:
                        return Task(self, claim, int(claim.item), self._items[int(claim.item)])
                    self.give_up(claim, f"{self._max_attempts} tries came to nothing; {self._last_error(claim.item)}")
                case "nothing now":
                    left = None if timeout is None else began + timeout - self._clock.monotonic()
                    if left is not None and left <= 0:
                        return None
                    with waiting(self._run, self._learner_id):
                        self._clock.wait(self._stop, self._poll_interval if left is None else min(self._poll_interval, left))
                case "held here":
                    return None
                case _:
                    self._ended = True
                    return None
        return None

    # --- settling -------------------------------------------------------------------------------------

    def finish(self, claim: Claim, result: object) -> None:
        try:
            self._work.finish(claim, value=result)
        except WorkFenced:
            self._forget(claim)
            raise
        self._forget(claim)

    def release(self, claim: Claim) -> None:
        self._forget(claim)
        self._work.release(claim)

    def give_up(self, claim: Claim, error: str) -> None:
        self._forget(claim)
        why = GivenUp(nonce=claim.nonce, attempt=claim.attempt, owner=self._work.owner, error=error)
        self._mailbox.put(self._keys.error(claim.item, claim.attempt), messages.encode(why))
        if claim.attempt < self._max_attempts:
            self._work.release(claim)
            return
        try:
            self._work.finish(claim, status="failed", error=error)
            log.error("item %s of %s is given up for good: %s", claim.item, self._keys.root, error)
        except WorkFenced as fenced:  # another node did it after all
            log.warning("%s", fenced)

    def _forget(self, claim: Claim) -> None:
        with self._lock:
            self._held.pop(claim.item, None)

    def _last_error(self, item: str) -> str:
        found = None
        for key in self._mailbox.list(self._keys.errors(item)):
            found = messages.read(self._mailbox, GivenUp, key) or found
        return f"the last error was: {found.error}" if found else "every node that held it died or gave it back"

    # --- searching ------------------------------------------------------------------------------------

    def _next(self) -> Claim | Literal["nothing now", "held here", "end"]:
        try:
            return next(self._claims, _END)
        except BaseException:  # the generator has ended, and the queue has not
            self._claims = self._search()
            raise

    def _search(self) -> Iterator[Claim | Literal["nothing now", "held here"]]:
        """The claims that this taker gets, and what keeps it from getting one."""
        yield from self._cursor.take(lambda place: self._work.claim_new(self._keys.item(place)))
        left: set[str] | None = None
        while left := self._unfinished(left):
            for item in sorted(left):
                match self._work.claim(item):
                    case Claim() as claim:
                        yield claim
                    case Outcome():
                        left.discard(item)
                    case None:
                        pass
            if not self._drain:
                return
            with self._lock:
                held = left <= self._held.keys()
            yield "held here" if held else "nothing now"

    def _unfinished(self, before: set[str] | None) -> set[str]:
        """Of the items ``before`` (None: of all), those without an outcome. Few are asked one by one, many listed."""
        if before is not None and len(before) <= _FEW:
            return {item for item in sorted(before) if self._work.outcome(item) is None}
        left = before if before is not None else {self._keys.item(place) for place in range(len(self._items))}
        return left.difference(last_segment(key) for key in self._mailbox.list(self._keys.outcomes()))
