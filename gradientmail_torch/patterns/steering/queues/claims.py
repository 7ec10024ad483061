"""A task server's side of a mailbox queue: it claims tasks under a lease, and commits one result for each.

Requests are listed a page at a time and claimed in their order, oldest first. A claim of a task that nobody has is
one request; servers that keep colliding spread out over the front of the queue. Tasks that others hold are watched,
also while there is no room for them, and taken over when their server is silent for a lease.
"""

from __future__ import annotations

import logging
import random
import threading

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, InvalidName, KillSignal, MailboxError, MailboxUnavailable, WorkFenced
from gradientmail_torch.keys import RequestKey, parse_request
from gradientmail_torch.messages import MAX_RECORD_BYTES, Count, Nonce, Record
from gradientmail_torch.patterns.leased_work import Claim, LeasedWork, Outcome
from gradientmail_torch.patterns.steering.queues.base import ServerInfo
from gradientmail_torch.patterns.steering.queues.store import TaskStore
from gradientmail_torch.patterns.steering.result import FailureInformation, Result, WorkerInformation

log = logging.getLogger(__name__)

_PAGE_KEYS = 1000
_WIDEST_CHOICE = 64


class ServerRecord(Record, frozen=True):
    """A task server's heartbeat, overwritten by it alone and deleted when it leaves."""

    nonce: Nonce
    count: Count
    server_id: str
    slots: Count
    methods: tuple[str, ...] = ()
    host: str = ""

    def info(self) -> ServerInfo:
        return ServerInfo(server_id=self.server_id, slots=self.slots, methods=self.methods, host=self.host)


class StopRecord(Record, frozen=True):
    """The servers of a queue shall stop."""

    nonce: Nonce
    drain: bool = True


class Presence:
    """Says every so often that a server is there."""

    def __init__(self, store: TaskStore, info: ServerInfo, *, nonce: str, interval_s: float, clock: Clock) -> None:
        self._store = store
        self._info = info
        self._nonce = nonce
        self._interval_s = interval_s
        self._clock = clock
        self._count = 0
        self._ending = threading.Event()
        self._try()
        self._task = clock.spawn(self._run, name=f"steering presence of {info.server_id}")

    def close(self) -> None:
        self._ending.set()
        self._task.join()
        try:
            self._store.mailbox.delete(self._store.keys.server(self._info.server_id))
        except MailboxError as error:
            log.warning("%s cannot say that it is leaving: %s", self._info.server_id, error)

    def _run(self) -> None:
        while not self._clock.wait(self._ending, self._interval_s):
            self._try()

    def _try(self) -> None:
        try:
            self._say()
        except MailboxUnavailable as error:  # the next one may get through
            log.warning("no heartbeat of %s: %s", self._info.server_id, error)

    def _say(self) -> None:
        self._count += 1
        record = ServerRecord(
            nonce=self._nonce,
            count=self._count,
            server_id=self._info.server_id,
            slots=self._info.slots,
            methods=self._info.methods,
            host=self._info.host,
        )
        self._store.mailbox.put(self._store.keys.server(self._info.server_id), messages.encode(record))


class TaskClaims:
    """What one server holds. :meth:`take` is called by one thread, the rest by any."""

    def __init__(
        self,
        store: TaskStore,
        info: ServerInfo,
        *,
        lease: float,
        poll_interval: float,
        max_attempts: int,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._store = store
        self._mailbox, self._keys = store.mailbox, store.keys
        self._methods = info.methods
        self._lease = lease
        self._poll_interval = poll_interval
        self._max_attempts = max_attempts
        self._clock = clock
        self._rng = rng
        # The limit on attempts is kept here: the result must say which task it was.
        self._work = LeasedWork(self._mailbox, self._keys, learner_id=info.server_id, lease=lease, max_attempts=None, clock=clock, rng=rng)
        self._presence = Presence(store, info, nonce=f"{rng.getrandbits(64):016x}", interval_s=lease / 5, clock=clock)
        self._lock = threading.Lock()
        self._held: dict[str, Claim] = {}  # by task ID
        self._parts: dict[str, int] = {}  # intermediate results sent, by task ID
        self._fresh: list[RequestKey] = []  # listed, and not tried yet
        self._contended: dict[str, RequestKey] = {}  # another server has it
        self._ended: set[str] = set()  # items that need no more work
        self._choice = 1  # how far from the front a task is chosen
        self._poll_at = self._stop_at = self._watch_at = clock.monotonic()
        self._stop: StopRecord | None = None

    # --- taking ---------------------------------------------------------------------------------------

    def take(self, wait_s: float) -> Result | None:
        """A task, claimed; None when there is none, after about ``wait_s`` seconds. Raises :class:`KillSignal`."""
        due_s = self._poll_at - self._clock.monotonic()
        if due_s > 0:
            self._clock.sleep(min(due_s, wait_s))
            if due_s > wait_s:
                return None
        self._look_for_stop()
        task = self._claim_any()
        if task is None:
            self._poll_at = self._clock.monotonic() + min(self._poll_interval, self._work.poll_limit)
            if self._stop is not None and not self._fresh:
                raise KillSignal("the task servers of this queue have been told to stop")
        return task

    def watch(self) -> None:
        """Observe the tasks that others hold, without taking any: for a server that has no room."""
        now = self._clock.monotonic()
        if now < self._watch_at:
            return
        self._watch_at = now + self._work.poll_limit / 2
        try:
            for item in list(self._contended):
                self._work.is_free(item)
        except MailboxUnavailable as error:
            log.warning("the tasks of others cannot be watched: %s", error)

    def _look_for_stop(self) -> None:
        now = self._clock.monotonic()
        if now >= self._stop_at:
            self._stop_at = now + self._poll_interval
            try:
                self._stop = messages.read(self._mailbox, StopRecord, self._keys.stop())
            except CorruptObject as error:  # nobody of this queue has written it
                log.warning("the signal to stop is not heeded: %s", error)
        if self._stop is not None and not self._stop.drain:
            raise KillSignal("the task servers of this queue have been told to stop, and to leave what waits")

    def _claim_any(self) -> Result | None:
        for request in list(self._contended.values()):
            if (task := self._take_over(request)) is not None:
                return task
        if not self._fresh:
            self._list()
        while self._fresh:
            request = self._fresh.pop(self._rng.randrange(min(self._choice, len(self._fresh))))
            claim = self._work.claim_new(request.item)
            if claim is None:
                self._contended[request.item] = request
                self._choice = min(2 * self._choice, _WIDEST_CHOICE)
            else:
                self._choice = max(1, self._choice - 1)
                if (task := self._opened(request, claim)) is not None:
                    return task
        return None

    def _take_over(self, request: RequestKey) -> Result | None:
        if not self._work.is_free(request.item):
            return None
        found = self._work.claim(request.item)
        if found is None:
            return None
        del self._contended[request.item]
        if isinstance(found, Outcome):
            self._ended.add(request.item)
            return None
        return self._opened(request, found)

    def _list(self) -> None:
        """The oldest requests that are not known yet, a page for each method at most."""
        found: list[RequestKey] = []
        listed: set[str] = set()
        whole = True
        with self._lock:
            held = {claim.item for claim in self._held.values()}
        for method in self._methods:
            unknown = 0
            for key in self._mailbox.list(self._keys.requests(method)):
                request = _parsed(key)
                if request is None:
                    continue
                listed.add(request.item)
                if request.item not in held and request.item not in self._ended and request.item not in self._contended:
                    found.append(request)
                    unknown += 1
                    if unknown == _PAGE_KEYS:
                        whole = False
                        break
        self._fresh = sorted(found, key=lambda request: request.item)
        if whole:  # what is not there any more has been dealt with
            self._ended &= listed
            self._contended = {item: request for item, request in self._contended.items() if item in listed}

    def _opened(self, request: RequestKey, claim: Claim) -> Result | None:
        """The task that was claimed; None where there is nothing to run."""
        with self._lock:
            self._held[request.task_id] = claim
        try:
            return self._examined(request, claim)
        except BaseException:  # a claim that nobody works on would be kept for ever
            if self._let_go(request.task_id) is not None:
                self._work.release(claim)
            raise

    def _examined(self, request: RequestKey, claim: Claim) -> Result | None:
        try:
            record = self._mailbox.get(self._keys.request(request.method, request.item), length=MAX_RECORD_BYTES + 1)
            if record is None:  # it has been dealt with since it was listed
                self._ended.add(request.item)
                self._let_go(request.task_id)
                self._work.release(claim)
                return None
            task = self._store.load(record)
            if (task.task_id, task.topic, task.method) != (request.task_id, request.topic, request.method):
                raise CorruptObject(f"the request {request.item!r} is not about the task that its name says")
        except CorruptObject as error:
            task = Result(((), {}), task_id=request.task_id, topic=request.topic, method=request.method)
            self._refuse(task, FailureInformation.from_exception(error))
            return None
        task.worker_info = WorkerInformation(attempt=claim.attempt)
        if claim.attempt > self._max_attempts:
            text = f"{self._max_attempts} task servers took this task, and each of them died, lost its lease or gave it back"
            self._refuse(task, FailureInformation(exception=text))
            return None
        return task

    def _refuse(self, task: Result, failure: FailureInformation) -> None:
        """End a task that shall not be run."""
        task.set_failure(failure)
        log.warning("task %s is not run: %s", task.task_id, failure.exception)
        try:
            self.send(task)
        except WorkFenced:
            pass

    # --- giving back ----------------------------------------------------------------------------------

    def send(self, result: Result) -> None:
        """Commit a serialized result, or add an intermediate one. Raises :class:`WorkFenced`; may be called again after an outage."""
        with self._lock:
            claim = self._held.get(result.task_id)
            if claim is None:
                raise WorkFenced(f"task {result.task_id} is not held by this server: its result was refused")
            place = self._parts.get(result.task_id, 0)
        if result.complete is False:
            record, _ = self._store.dump(result, claim.item, f"{claim.nonce}-{place}")
            self._mailbox.put(self._keys.part(claim.item, claim.attempt, place), record)
            with self._lock:
                self._parts[result.task_id] = place + 1
            return
        record, written = self._store.dump(result, claim.item, claim.nonce)
        try:
            self._work.finish(claim, status="done" if result.success else "failed", value=msgspec.Raw(record))
        except WorkFenced:
            self._let_go(result.task_id)
            for key in written:  # another's result stands, and refers to its own
                self._mailbox.delete(key)
            raise
        self._let_go(result.task_id)
        self._ended.add(claim.item)

    def give_back(self, task: Result) -> None:
        claim = self._let_go(task.task_id)
        if claim is not None:
            self._work.release(claim)

    def is_revoked(self, task: Result) -> bool:
        with self._lock:
            claim = self._held.get(task.task_id)
        return claim is None or self._work.is_fenced(claim)

    def close(self) -> None:
        """Give everything back and say so."""
        self._work.close()
        self._presence.close()

    def _let_go(self, task_id: str) -> Claim | None:
        with self._lock:
            self._parts.pop(task_id, None)
            return self._held.pop(task_id, None)


def _parsed(key: str) -> RequestKey | None:
    try:
        return parse_request(key)
    except InvalidName as error:
        log.warning("%s: it is left alone", error)
        return None
