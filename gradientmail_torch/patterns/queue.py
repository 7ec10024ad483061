"""Work items that the nodes present take as they go, each handed to one node at a time and counted done once."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from gradientmail_torch import messages
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, RunTimeout, WorkFenced
from gradientmail_torch.keys import QueueKeys, check_learner_id, parse_claim
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox, open_mailbox
from gradientmail_torch.patterns.beat_helper import check_url
from gradientmail_torch.patterns.heartbeat import Attentive
from gradientmail_torch.patterns.leased_work import LeasedWork, Outcome
from gradientmail_torch.patterns.queue_cursor import Cursor
from gradientmail_torch.patterns.queue_items import Items, Manifest, publish
from gradientmail_torch.patterns.queue_taker import Taker, Task

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a queue is, over all nodes."""

    done: int
    """Finished; those given up are not among them."""
    claimed: int
    """Handed out and unfinished; a dead node's too, until they are taken over and done."""
    left: int
    """Handed out to nobody yet."""
    failed: int
    """Given up after ``max_attempts``."""


class SharedQueue:
    """Hands out the items of a list to whichever nodes are there.

    ::

        queue = SharedQueue(f"shards-{epoch}", mailbox=box, learner_id="node-0")
        queue.fill(shards)              # every node may: the first one does it
        for shard in queue:             # ends when every item is done, on whichever node
            train_on(shard)             # done when the loop asks for the next one

    Items are JSON values of at most 128 KiB: names of files, ranges, settings. Each is handed to one node at a
    time. A node that dies loses its items to the others after ``lease`` seconds; one that leaves the loop by
    ``break``, an exception or SIGTERM turned into one gives its item back at once. So an item may be *begun* more
    than once, and is counted done exactly once; :attr:`Task.attempt` tells the tries apart.

    Cost at 10,000 items, counted: 2.1 mailbox requests per item with 1 or 8 nodes, 2.2 with 32. A claim and an
    outcome each; listings and the rest share the remainder. No claim lists all items.

    Args:
        name: serves once per run; put the epoch into it.
        mailbox: the run's mailbox, or its URL.
        learner_id: who takes the items.
        lease: seconds without a sign of life after which a node's items go to others; the same on all nodes.
        poll_interval: seconds between two looks at the items that others hold, when nothing else is left.
        drain: wait for the items that other nodes hold, to take over those of a dead one. False: end when there
            is nothing left to claim.
        max_attempts: tries that an item gets, whether its node died or :meth:`requeue` gave it back.
        fill_timeout: seconds to wait for another node to fill the queue.
        outage_timeout: seconds that the mailbox may be away.
        max_freeze: seconds for which the loop may freeze all threads of this process, by one long call into C that
            holds Python's global lock. Above 0, a helper process beats meanwhile; the mailbox must then be a URL.
    """

    def __init__(
        self,
        name: str,
        mailbox: Mailbox | str | os.PathLike[str],
        learner_id: str,
        *,
        lease: float = 60.0,
        poll_interval: float = 1.0,
        drain: bool = True,
        max_attempts: int = 5,
        fill_timeout: float = 600.0,
        outage_timeout: float = 600.0,
        max_freeze: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        if not 0 < poll_interval <= lease / 4:
            raise ConfigError(f"poll_interval must be above 0 and at most a quarter of the lease of {lease} seconds, not {poll_interval}")
        if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1:
            raise ConfigError(f"max_attempts must be a whole number of at least 1, not {max_attempts!r}")
        self.name = name
        self.learner_id = check_learner_id(learner_id)
        self._keys = QueueKeys.of(name)
        self._rng = rng or random.Random()
        self._direct = Attentive(open_mailbox(mailbox, clock=clock), lease=lease, clock=clock)
        self._mailbox = RetryingMailbox(self._direct, patience_s=outage_timeout, clock=clock, rng=self._rng)
        self._lease = lease
        self._poll_interval = poll_interval
        self._drain = drain
        self._max_attempts = max_attempts
        self._fill_timeout = fill_timeout
        self._outage_timeout = outage_timeout
        self._helper_url, self._max_freeze = check_url(mailbox, max_freeze), max_freeze
        self._clock = clock
        self._current: Task | None = None
        self._stop = threading.Event()

    def __repr__(self) -> str:
        return f"SharedQueue({self.name!r}, {self._mailbox!r})"

    def fill(self, items: Iterable[object], *, seed: int | None = None) -> int:
        """Put ``items`` into the queue, in random order where a ``seed`` is given. Returns how many there are.

        Several nodes may call it with the same items and seed. Other ones under the same name are refused with
        :class:`ConfigError`, and so is an item that is no JSON value; nothing is recorded then.
        """
        if isinstance(items, (str, bytes, dict)):
            raise ConfigError(f"fill takes a list of items, not a {type(items).__name__}")
        nonce = f"{self._rng.getrandbits(64):016x}"
        return publish(self._mailbox, self._keys, list(items), seed=seed, nonce=nonce, name=self.name).count

    def __iter__(self) -> Iterator[object]:
        """The values of :meth:`tasks`."""
        with contextlib.closing(self.tasks()) as tasks:
            try:
                for self._current in tasks:
                    yield self._current.value
            finally:
                self._current = None

    def requeue(self, error: BaseException | str) -> None:
        """Give the item that the loop is at back for another try, here or elsewhere, because of ``error``."""
        if self._current is None:
            raise ConfigError(f"requeue: no loop over queue {self.name!r} is at an item")
        self._current.requeue(error)

    def tasks(self) -> Generator[Task, None, None]:
        """Like iterating, with each item's place and attempt.

        A task that is not settled when the next one is asked for is done; one that is not settled when the
        generator is closed goes back.
        """
        with self.open() as taker:
            while (task := taker.take()) is not None:
                yield task
                if not task.settled:
                    try:
                        task.done()
                    except WorkFenced as error:  # it is done, by another: the loop goes on
                        log.warning("%s", error)

    def open(self) -> Taker:
        """For callers that hold several items at once: take them and settle them yourself. A context manager."""
        items = Items(self._mailbox, self._keys, self._manifest())
        work = LeasedWork(
            self._direct,
            self._keys,
            learner_id=self.learner_id,
            lease=self._lease,
            max_attempts=None,  # the taker counts, and says why
            outage_timeout=self._outage_timeout,
            helper_url=self._helper_url,
            max_freeze=self._max_freeze,
            clock=self._clock,
            rng=self._rng,
        )
        fresh_for = 5 * self._poll_interval
        cursor = Cursor(self._mailbox, self._keys, len(items), clock=self._clock, rng=self._rng, fresh_for=fresh_for)
        return Taker(
            self._mailbox,
            self._keys,
            work,
            cursor,
            items,
            drain=self._drain,
            poll_interval=self._poll_interval,
            max_attempts=self._max_attempts,
            learner_id=self.learner_id,
            stop=self._stop,
            clock=self._clock,
        )

    def stop(self) -> None:
        """End every loop over this object when it asks for its next item. May be called from a signal handler."""
        self._stop.set()

    def progress(self) -> Progress:
        """Counted by listing claims and outcomes, a request per 1,000 each: for a report, not for a loop."""
        total = self._manifest().count
        ended = sum(1 for _ in self._mailbox.list(self._keys.outcomes()))
        begun = len({key.rpartition("/")[0] for key in self._mailbox.list(self._keys.claims())})
        failed = len(self.failures())
        return Progress(done=ended - failed, claimed=max(0, begun - ended), left=total - max(begun, ended), failed=failed)

    def failures(self) -> dict[int, str]:
        """Why items were given up for good, by their place in the queue."""
        gave_up = dict.fromkeys(parse_claim(key).item for key in self._mailbox.list(self._keys.errors()))
        found = [(item, messages.read(self._mailbox, Outcome, self._keys.outcome(item))) for item in gave_up]
        return {int(item): outcome.error for item, outcome in found if outcome is not None and outcome.status != "done"}

    def outcomes(self) -> Iterator[Outcome]:
        """How each finished item ended, and by whom: a request per item, for reports."""
        for key in self._mailbox.list(self._keys.outcomes()):
            if (outcome := messages.read(self._mailbox, Outcome, key)) is not None:
                yield outcome

    def _manifest(self) -> Manifest:
        began = self._clock.monotonic()
        while (found := messages.read(self._mailbox, Manifest, self._keys.manifest())) is None:
            if self._clock.monotonic() - began >= self._fill_timeout:
                raise RunTimeout(
                    f"queue {self.name!r} in {self._mailbox!r} was not filled within {self._fill_timeout:g} s. Call fill on some node"
                )
            self._clock.sleep(self._poll_interval)
        return found
