"""Work that one party at a time does for all, and that another takes over when it dies.

The rule that the queue, the synchronization node and steering share, over ``put_if_absent`` alone:

* A **claim** is an object created once, ``claims/{item}/{attempt}``. Whoever creates the next attempt has the item.
* Its owner **beats** in an object of its own, one for all its claims, so that the cost does not grow with them.
* Who has seen no new beat for ``lease`` seconds *of its own observation* creates attempt + 1. No two machines'
  clocks are compared, and of a time in which the observer was away at most ``lease / 4`` counts.
* The **outcome** is one object created once: the first attempt to finish wins, and a zombie's is refused.
* An owner that gives up a claim, or stops on notice, says so in its beat, and nobody waits for the lease.

So an item is *executed* at least once and its outcome *committed* exactly once. ``claim.attempt`` is the fencing
token for whatever the work writes elsewhere. Outcomes and claims are never deleted while work may go on: they are
the fence.

::

    work = LeasedWork(mailbox, WorkKeys("jobs/"), learner_id="node-0")
    match work.claim("job-7"):
        case Claim() as claim: work.finish(claim, value=run_job(attempt=claim.attempt))
        case Outcome() as outcome: ...      # somebody has finished it
        case None: ...                      # somebody is at it: sleep at most work.poll_limit seconds, ask again
    work.close()
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Literal

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, InvalidName, WorkFenced
from gradientmail_torch.keys import WorkKeys, check_learner_id, parse_claim
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox
from gradientmail_torch.messages import Count, Nonce, Record
from gradientmail_torch.patterns.beat_helper import BeatHelper
from gradientmail_torch.patterns.heartbeat import Attentive, Heartbeat, Watch
from gradientmail_torch.patterns.json_values import from_json, to_json

__all__ = ["Claim", "LeasedWork", "Outcome", "Status", "WorkKeys"]

log = logging.getLogger(__name__)

Status = Literal["done", "failed", "skipped", "abandoned"]


class Outcome(Record, frozen=True):
    """How an item ended; created once. Large values are objects of their own, which ``value`` names."""

    item: str
    status: Status
    """``abandoned``: every attempt allowed was claimed and none of them finished."""
    nonce: Nonce
    attempt: Count = 0
    """The attempt that finished; 0 for what was decided without running anything."""
    owner: str = ""
    value: msgspec.Raw = msgspec.Raw(b"null")
    """JSON; :meth:`decoded` gives it as Python values."""
    error: str = ""
    """What went wrong, for people."""

    def decoded(self) -> object:
        return from_json(bytes(self.value), what=f"the outcome of {self.item!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to work on an item, until another attempt finishes it."""

    item: str
    attempt: int
    """Counts from 1. The fencing token: of two parties that think they hold an item, the higher is in the right."""
    nonce: str


class _ClaimRecord(Record, frozen=True):
    nonce: Nonce
    owner: str
    beat: Count
    """Number of the owner's newest beat when it began to claim: a later one that lacks ``nonce`` has given it up."""
    at: float = 0.0
    """Seconds since 1970 by the owner's clock; for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """The newest known claim of an item."""

    attempt: int
    record: _ClaimRecord


class LeasedWork:
    """One party's view of the items below ``keys.root``. Safe to use from several threads.

    Nothing is written and no thread runs before the first claim. Every operation may raise
    :class:`~gradientmail_torch.errors.MailboxError` and can then be called again.

    Args:
        mailbox: where the items are. As :class:`Attentive` it may be shared with other requests of this party,
            which then count as signs that it is awake.
        keys: the names of the objects; override its methods to place outcomes elsewhere.
        learner_id: who this is, for people; a fresh owner name is drawn for each object of this class.
        lease: seconds without a new beat after which another party takes over; the same for all parties.
        max_attempts: claims that an item may have. When the last one is lost too, the item is ``abandoned``,
            so that work which kills its process ends. None: without end.
        outage_timeout: seconds for which an operation waits for a mailbox that does not answer. Heartbeats do
            not wait: one that fails is tried again at the next.
        watch: what has been seen of others; give one to keep it over several objects of this class, which then
            must share an :class:`Attentive` mailbox.
        helper_url: URL of ``mailbox``, for a process that beats while this one is frozen, for ``max_freeze`` seconds
            at most: see :mod:`gradientmail_torch.patterns.beat_helper`.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        keys: WorkKeys,
        *,
        learner_id: str,
        lease: float = 60.0,
        max_attempts: int | None = 5,
        outage_timeout: float = 0.0,
        watch: Watch | None = None,
        helper_url: str | None = None,
        max_freeze: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        if not lease > 0:
            raise ConfigError(f"lease must be above 0 seconds, not {lease!r}")
        if max_attempts is not None and max_attempts < 1:
            raise ConfigError(f"max_attempts must be None or at least 1, not {max_attempts!r}")
        self._rng = rng or random.Random()
        attentive = mailbox if isinstance(mailbox, Attentive) else Attentive(mailbox, lease=lease, clock=clock)
        self._mailbox = RetryingMailbox(attentive, patience_s=outage_timeout, clock=clock, rng=self._rng)
        self._keys = keys
        self._clock = clock
        self._lease = lease
        self._max_attempts = max_attempts
        self.owner = f"{check_learner_id(learner_id)}-{self._nonce()}"
        beats, interval = keys.beat(self.owner), lease / 5
        helper = partial(BeatHelper, helper_url, beats, interval=interval, max_freeze=max_freeze) if helper_url is not None else None
        self._heart = Heartbeat(mailbox, beats, interval=interval, clock=clock, helper=helper)
        self._watch = watch or Watch(self._mailbox, attentive, lease=lease, clock=clock)
        self._standings: dict[str, _Standing] = {}
        self._lock = threading.Lock()  # never held over a mailbox operation

    def __enter__(self) -> LeasedWork:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def poll_limit(self) -> float:
        """Seconds after which :meth:`claim` must be asked again for an observation to count."""
        return self._lease / 4

    # --- taking ---------------------------------------------------------------------------------------

    def claim_new(self, item: str) -> Claim | None:
        """Claim an item that nobody has claimed yet: one request. None when somebody has."""
        return self._create(item, 1)

    def claim(self, item: str) -> Claim | Outcome | None:
        """Take ``item`` if it is free, which it is when new, given up, or its owner's beat is stale.

        Returns the claim; or the outcome where one is found; or None while another party holds it. Ask again
        at least every ``poll_limit`` seconds: a waiting party costs one GET per owner and call. While None is
        returned the outcome is not looked at: see :meth:`outcome`.
        """
        with self._lock:
            standing = self._standings.get(item)
        if standing is None:
            if (claim := self.claim_new(item)) is not None:
                return claim
            standing = self._find(item)
            if standing is None:  # a listing that lags behind, or a sweep
                return None
        if not self._is_free(standing.record):
            return None
        with self._lock:  # whatever comes next, the newest claim must be looked up again
            self._standings.pop(item, None)
        if (found := self.outcome(item)) is not None:
            return found
        if self._max_attempts is not None and standing.attempt >= self._max_attempts:
            return self._abandon(item, standing)
        return self._create(item, standing.attempt + 1)

    def is_free(self, item: str) -> bool:
        """Whether :meth:`claim` would take ``item``: observes as it does, and takes nothing. For one who has no room yet."""
        with self._lock:
            standing = self._standings.get(item)
        standing = standing or self._find(item)
        return standing is None or self._is_free(standing.record)

    def outcome(self, item: str) -> Outcome | None:
        """The outcome of ``item``, None while there is none: one GET."""
        found = messages.read(self._mailbox, Outcome, self._keys.outcome(item))
        if found is not None:
            with self._lock:
                self._standings.pop(item, None)
        return found

    def is_fenced(self, claim: Claim) -> bool:
        """Whether a later attempt has begun or any has finished, so that going on is in vain: two GETs."""
        later = self._mailbox.get(self._keys.claim(claim.item, claim.attempt + 1), length=1)
        if later is not None:
            return True
        found = self.outcome(claim.item)
        return found is not None and found.nonce != claim.nonce

    # --- giving back ----------------------------------------------------------------------------------

    def finish(self, claim: Claim, *, status: Status = "done", value: object = None, error: str = "") -> Outcome:
        """Commit the outcome of ``claim``; ``value`` is a JSON value, or ``msgspec.Raw`` with one.

        Raises :class:`WorkFenced` when another attempt finished first. May be called again after a
        ``MailboxError``: the claim is kept, and its nonce tells whether the first call had succeeded after all.
        """
        outcome = Outcome(
            item=claim.item,
            status=status,
            nonce=claim.nonce,
            attempt=claim.attempt,
            owner=self.owner,
            value=_raw(value, claim.item),
            error=error,
        )
        standing = self._settle(outcome)
        self._heart.drop(claim.nonce, tell=False)
        if standing.nonce != claim.nonce:
            raise WorkFenced(
                f"attempt {claim.attempt} at {claim.item!r} in {self._mailbox!r} was taken over: attempt {standing.attempt} of "
                f"{standing.owner or 'another party'} finished first ({standing.status}). This result was refused"
            )
        return standing

    def decide(self, item: str, *, status: Status, value: object = None, error: str = "", claim: Claim | None = None) -> Outcome:
        """Commit an outcome that any party would decide alike, unless there is one. Returns the one that stands.

        ``claim``: a claim on the item that ends with it.
        """
        decided = Outcome(item=item, status=status, nonce=self._nonce(), owner=self.owner, value=_raw(value, item), error=error)
        outcome = self._settle(decided)
        if claim is not None:
            self._heart.drop(claim.nonce, tell=False)
        return outcome

    def release(self, claim: Claim) -> None:
        """Give ``claim`` up unfinished: others may take the item as soon as they see the next beat."""
        self._heart.drop(claim.nonce, tell=True)

    def close(self) -> None:
        """Give up every claim that is held, tell the others, and end the beating thread. Idempotent."""
        self._heart.close()

    # --- claims ---------------------------------------------------------------------------------------

    def _create(self, item: str, attempt: int) -> Claim | None:
        """Claim ``item`` as ``attempt``; None when another party was quicker."""
        key = self._keys.claim(item, attempt)
        nonce = self._nonce()
        beat = self._heart.hold(nonce)  # before the claim exists, so that no later beat lacks it
        record = _ClaimRecord(nonce=nonce, owner=self.owner, beat=beat, at=self._clock.wall())
        try:
            created = self._mailbox.put_if_absent(key, messages.encode(record))
        except BaseException:
            self._heart.drop(nonce, tell=True)  # it may have been created
            raise
        if not created:
            self._heart.drop(nonce, tell=False)
            return None
        return Claim(item=item, attempt=attempt, nonce=nonce)

    def _find(self, item: str) -> _Standing | None:
        """The newest claim of ``item``: one listing, of this item alone, and one GET."""
        newest = 0
        for listed in self._mailbox.list(self._keys.claims(item)):
            with contextlib.suppress(InvalidName):  # not ours
                newest = max(newest, parse_claim(listed).attempt)
        if not newest:
            return None
        key = self._keys.claim(item, newest)
        try:
            record = messages.read(self._mailbox, _ClaimRecord, key)
        except CorruptObject as error:
            log.warning("%s: it is taken over after a lease", error)
            record = None
        standing = _Standing(attempt=newest, record=record or _ClaimRecord(nonce="0" * 16, owner="nobody", beat=0))
        with self._lock:
            self._standings[item] = standing
        return standing

    def _is_free(self, record: _ClaimRecord) -> bool:
        if record.owner == self.owner:
            return not self._heart.holds(record.nonce)
        return self._watch.has_left(record.nonce, self._keys.beat(record.owner), record.beat)

    def _abandon(self, item: str, standing: _Standing) -> Outcome:
        return self._settle(
            Outcome(
                item=item,
                status="abandoned",
                nonce=self._nonce(),
                attempt=standing.attempt,
                owner=standing.record.owner,
                error=f"{standing.attempt} attempts were made and none of them finished, the last by {standing.record.owner}",
            )
        )

    def _settle(self, outcome: Outcome) -> Outcome:
        """Create ``outcome`` unless there is one. Returns the one that stands."""
        key, record = self._keys.outcome(outcome.item), messages.encode(outcome)
        if len(record) > messages.MAX_RECORD_BYTES:  # nobody would read it, and nobody could make another
            raise ConfigError(
                f"the outcome of {outcome.item!r} takes {len(record)} bytes, at most {messages.MAX_RECORD_BYTES} fit: "
                "put the value elsewhere and give its name"
            )
        if self._mailbox.put_if_absent(key, record):
            return outcome
        if (found := self.outcome(outcome.item)) is None:
            raise WorkFenced(f"the outcome {key!r} was there and is gone: {self._mailbox!r} has been swept")
        return found

    def _nonce(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"


def _raw(value: object, item: str) -> msgspec.Raw:
    return value if isinstance(value, msgspec.Raw) else msgspec.Raw(to_json(value, what=f"the value of {item!r}"))
