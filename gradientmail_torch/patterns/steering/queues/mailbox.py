"""Queues over a mailbox: Thinker and task servers share nothing but a bucket or a directory."""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, InvalidName, MailboxUnavailable
from gradientmail_torch.keys import ResultKey, TaskKeys, decode_name, last_segment, parse_request, parse_result
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox, is_signed, open_mailbox
from gradientmail_torch.messages import MAX_RECORD_BYTES
from gradientmail_torch.patterns.heartbeat import Attentive, Observation
from gradientmail_torch.patterns.leased_work import LeasedWork, Outcome
from gradientmail_torch.patterns.steering.queues.base import QueueRole, ServerInfo, TaskQueues
from gradientmail_torch.patterns.steering.queues.claims import ServerRecord, StopRecord, TaskClaims
from gradientmail_torch.patterns.steering.queues.store import TaskStore
from gradientmail_torch.patterns.steering.result import FailureInformation, Result

log = logging.getLogger(__name__)


MAX_REQUEST_BYTES = MAX_RECORD_BYTES // 2
"""What came with a request goes back with its result, and something is said beside it."""


class MailboxQueues(TaskQueues):
    """Queues in a mailbox, for task servers on machines that come and go.

    A request is an object that stays until its result has been acknowledged, so nothing is lost when the Thinker or
    a server dies: another server takes the task over after ``lease`` seconds, and a new Thinker calls
    :meth:`recover`. Each task has exactly one result; after :meth:`recover` a Thinker may be shown one again that it has
    acknowledged, when the store carried out the request very late. Per task this takes about seven requests.

    Args:
        mailbox: a mailbox, or its URL. To start a server in another process it must be the URL.
        topics: labels that keep the results of different agents apart.
        name: of the campaign; Thinker and servers give the same.
        serialization_method: of what this side sends: ``json``, with tensors and arrays as safetensors, or ``pickle``.
            Who reads a pickled value runs any code that its writer put into it. So it is read in a signed run, where
            only who has the run's key can write, and else where this side has chosen ``pickle`` itself, knowingly.
        poll_interval: seconds between two looks for tasks, or results.
        lease: seconds of silence after which a server is taken to be dead.
        max_attempts: servers that may die on a task before it counts as failed.
        auto_ack: whether :meth:`get_result` acknowledges what it returns. Otherwise call :meth:`ack`, as the
            ``result_processor`` agents do: a result that was not acknowledged comes again after :meth:`recover`.
        inline_bytes: larger values are objects of their own.
        max_value_bytes: larger values are refused.
    """

    def __init__(
        self,
        mailbox: Mailbox | str | os.PathLike[str],
        topics: Collection[str] = (),
        name: str = "default",
        serialization_method: str = "json",
        keep_inputs: bool = True,
        *,
        poll_interval: float = 1.0,
        lease: float = 60.0,
        max_attempts: int = 5,
        auto_ack: bool = True,
        inline_bytes: int = 32 << 10,
        max_value_bytes: int = 4 << 30,
        server_timeout: float | None = None,
        outage_timeout: float = 600.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        for setting, value in (("poll_interval", poll_interval), ("lease", lease), ("max_attempts", max_attempts)):
            if not value > 0:
                raise ConfigError(f"{setting} must be above 0, not {value!r}")
        self.name = name
        self.poll_interval = poll_interval
        self._keys = TaskKeys.of(name)
        self._lease = lease
        self._max_attempts = max_attempts
        self._auto_ack = auto_ack
        self._sizes = {"inline_bytes": inline_bytes, "limit_bytes": max_value_bytes}
        self._rng = rng or random.Random()
        self._where = mailbox
        self._mailbox = open_mailbox(mailbox, clock=clock)
        super().__init__(
            topics, serialization_method, keep_inputs, server_timeout=server_timeout, outage_timeout=outage_timeout, clock=clock
        )

    def _reset(self) -> None:
        super()._reset()
        self._attentive = Attentive(self._mailbox, lease=self._lease, clock=self.clock)
        self._patient = RetryingMailbox(self._attentive, patience_s=self._outage_timeout, clock=self.clock, rng=self._rng)
        where = self._attentive if self.role is QueueRole.SERVER else self._patient
        self._store = TaskStore(
            where, self._keys, **self._sizes, allow_pickle=self.serialization_method == "pickle" or is_signed(self._mailbox)
        )
        self._items: dict[str, str] = {}  # by task ID: asked for, last result not taken yet
        self._requests: dict[str, str] = {}  # key of the request by task ID, until it is acknowledged
        self._parts: dict[str, list[str]] = {}  # keys of intermediate results that were taken, by task ID
        self._large: set[str] = set()  # IDs of tasks whose intermediate results had objects of their own
        self._found: dict[str, deque[str]] = {}  # keys of results that were seen and not taken, by topic
        self._known: set[str] = set()  # keys of results that have been seen
        self._look_at: dict[str, float] = {}
        self._newest_ms = 0
        self._observed: dict[str, Observation] = {}
        self._claims: TaskClaims | None = None
        self._opened = False

    def __getstate__(self) -> dict[str, Any]:
        own = (
            "_store",
            "_attentive",
            "_patient",
            "_items",
            "_requests",
            "_parts",
            "_large",
            "_found",
            "_known",
            "_look_at",
            "_newest_ms",
            "_observed",
            "_claims",
            "_mailbox",
        )
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._mailbox = open_mailbox(state["_where"], clock=state["clock"])
        super().__setstate__(state)

    def __repr__(self) -> str:
        return f"queue {self.name!r} in {self._mailbox!r}"

    # --- requests -------------------------------------------------------------------------------------

    def _send_request(self, task: Result) -> None:
        if not task.method:
            raise ConfigError("a task needs method=…: the servers of a mailbox look for the methods that they offer")
        with self._lock:
            self._newest_ms = max(self._newest_ms + 1, int(self.clock.wall() * 1000))
            created_ms = self._newest_ms
        item = self._keys.item(created_ms, task.task_id, task.topic or "default")
        request = self._keys.request(task.method, item)
        self._reopen()
        record, _ = self._store.dump(task, item, "inputs", limit_bytes=MAX_REQUEST_BYTES)
        with self._lock:
            self._items[task.task_id] = item
            self._requests[task.task_id] = request
        try:
            self._patient.put(request, record)
        except BaseException:
            with self._lock:
                self._items.pop(task.task_id, None)
                self._requests.pop(task.task_id, None)
            raise

    def _reopen(self) -> None:
        """Servers that start from now on shall serve, whatever an earlier Thinker has told them."""
        with self._lock:
            opened, self._opened = self._opened, True
        if not opened:
            self._patient.delete(self._keys.stop())

    def cancel(self, task_id: str) -> bool:
        with self._lock:
            item, request = self._items.get(task_id), self._requests.get(task_id)
        if item is None or request is None:
            return False
        record = self._patient.get(request, length=MAX_RECORD_BYTES + 1)
        if record is None:
            return False
        task = self._store.load(record)
        task.set_failure(FailureInformation(exception="the task was cancelled"))
        with LeasedWork(
            self._attentive,
            self._keys,
            learner_id="thinker",
            lease=self._lease,
            outage_timeout=self._outage_timeout,
            clock=self.clock,
            rng=self._rng,
        ) as work:
            value, _ = self._store.dump(task, item, "inputs")
            return work.decide(item, status="skipped", value=msgspec.Raw(value)).status == "skipped"

    def recover(self) -> list[str]:
        found = []
        for key in self._patient.list(self._keys.requests()):
            try:
                request = parse_request(key)
            except InvalidName as error:
                log.warning("%s: it is left alone", error)
                continue
            if request.topic not in self.topics:
                log.warning("task %s is of topic %r, which this queue does not have: it is left alone", request.task_id, request.topic)
                continue
            with self._lock:
                self._items[request.task_id] = request.item
                self._requests[request.task_id] = key
            self._register(request.task_id, request.topic)
            found.append(request.task_id)
        return found

    def send_kill_signal(self, drain: bool = True) -> None:
        self._check_role(QueueRole.CLIENT, "send_kill_signal")
        self._patient.put(self._keys.stop(), messages.encode(StopRecord(nonce=f"{self._rng.getrandbits(64):016x}", drain=drain)))
        with self._lock:
            self._opened = False

    def flush(self) -> None:
        for key in self._attentive.list(self._keys.root):
            self._attentive.delete(key)
        for task_id in list(self._active):
            self._finished(task_id)

    def servers(self) -> list[ServerInfo]:
        found = []
        for key in self._attentive.list(self._keys.servers()):
            began = self._attentive.watched_s
            try:
                data = self._attentive.get(key, length=MAX_RECORD_BYTES)
                seen = self._observed.setdefault(key, Observation(self._lease))
                seen.see(data, began=began, ended=self._attentive.watched_s)
                if data is not None and not seen.stale:
                    found.append(messages.decode(ServerRecord, data, key=key).info())
            except CorruptObject as error:
                log.warning("task server %s: %s", decode_name(last_segment(key)), error)
        return found

    # --- results --------------------------------------------------------------------------------------

    def get_result(self, topic: str = "default", timeout: float | None = None) -> Result:
        result = super().get_result(topic, timeout)
        if self._auto_ack:
            try:
                self.ack(result)
            except MailboxUnavailable as error:  # at worst it comes again after recover()
                log.warning("result of task %s is not acknowledged: %s", result.task_id, error)
        return result

    def _take_result(self, topic: str, wait_s: float) -> Result | None:
        if (key := self._next_found(topic)) is None:
            if (due_s := self._look_at.get(topic, 0.0) - self.clock.monotonic()) > 0:
                self.clock.sleep(min(due_s, wait_s))
                if due_s > wait_s > 0:
                    return None
            self._look(topic)
            if (key := self._next_found(topic)) is None:
                return None
        try:
            return self._read(key)
        except MailboxUnavailable:
            with self._lock:
                self._found[topic].appendleft(key)
            raise

    def _next_found(self, topic: str) -> str | None:
        with self._lock:
            found = self._found.get(topic)
            return found.popleft() if found else None

    def _look(self, topic: str) -> None:
        """List the results of this Thinker's tasks: those of a task in their order, its outcome last."""
        with self._lock:
            wanted = {item for task_id, item in self._items.items() if self._active.get(task_id) == topic}
        self._look_at[topic] = self.clock.monotonic() + self.poll_interval
        if not wanted:
            return
        youngest = max(wanted)
        outcomes: list[str] = []
        parts: dict[str, list[str]] = {}
        for key in self._attentive.list(self._keys.results(topic), after=self._keys.results_from(min(wanted))):
            if (result := _parsed(key)) is None or result.item not in wanted:
                if result is not None and result.item > youngest:
                    break
                continue
            if result.part is None:
                outcomes.append(key)
            else:
                parts.setdefault(result.item, []).append(key)
        ended = {parse_result(key).item: key for key in outcomes}
        ordered = [key for item, keys in parts.items() for key in [*keys, *([ended.pop(item)] if item in ended else [])]]
        with self._lock:
            fresh = [key for key in [*ordered, *ended.values()] if key not in self._known]
            self._known.update(fresh)
            self._found.setdefault(topic, deque()).extend(fresh)

    def _read(self, key: str) -> Result:
        """The result at ``key``, its values at hand. One that cannot be read is a failed one."""
        about = parse_result(key)
        try:
            if about.part is None:
                outcome = messages.read(self._attentive, Outcome, key)
                if outcome is None:
                    raise CorruptObject(f"the result {key!r} is gone from {self._mailbox!r}")
                result = self._store.load(bytes(outcome.value))
            else:
                result = self._store.load(self._attentive.get(key, length=MAX_RECORD_BYTES + 1) or b"")
            if result.task_id != _task_id(about) or (result.complete is False) != (about.part is not None):
                raise CorruptObject(f"{key!r} does not hold the result that its name says")
            self._store.fetch(result)
        except CorruptObject as error:
            result = _broken(about, error)
        with self._lock:
            if about.part is None:
                self._items.pop(result.task_id, None)
                self._known.discard(key)
            else:
                self._parts.setdefault(result.task_id, []).append(key)
                if self._store.has_data(result):
                    self._large.add(result.task_id)
        return result

    def _ack(self, result: Result) -> None:
        """The request goes first: it is what :meth:`recover` goes by."""
        ended = result.complete is not False
        with self._lock:
            request = self._requests.pop(result.task_id, None) if ended else None
            parts = self._parts.pop(result.task_id, [])
            self._known.difference_update(parts if ended else ())
        if request is not None:
            self._patient.delete(request)
        for key in parts:
            self._patient.delete(key)
        if request is not None and (result.task_id in self._large or self._store.has_data(result)):
            self._large.discard(result.task_id)
            self._store.delete_data(parse_request(request).item)

    # --- the server's side ----------------------------------------------------------------------------

    def for_server(self, info: ServerInfo) -> MailboxQueues:
        end = type(self).__new__(type(self))
        end.__dict__.update(self.__getstate__(), _mailbox=self._mailbox, role=QueueRole.SERVER)
        end._reset()
        end._claims = TaskClaims(
            end._store,
            info,
            lease=self._lease,
            poll_interval=self.poll_interval,
            max_attempts=self._max_attempts,
            clock=self.clock,
            rng=self._rng,
        )
        return end

    @property
    def _server(self) -> TaskClaims:
        if self._claims is None:
            raise ConfigError("only a server's end takes tasks from a mailbox: use a task server, or queues.for_server(ServerInfo(…))")
        return self._claims

    def _take_task(self, wait_s: float) -> Result | None:
        return self._server.take(wait_s)

    def _send_result(self, result: Result) -> None:
        self._server.send(result)

    def give_back(self, task: Result) -> None:
        self._server.give_back(task)

    def is_revoked(self, task: Result) -> bool:
        return self._server.is_revoked(task)

    def ready(self, task: Result) -> Result:
        return self._store.fetch(task)

    def tend(self) -> None:
        self._server.watch()

    def close(self) -> None:
        claims, self._claims = self._claims, None
        if claims is not None:
            claims.close()


def _parsed(key: str) -> ResultKey | None:
    try:
        return parse_result(key)
    except InvalidName as error:
        log.warning("%s: it is left alone", error)
        return None


def _task_id(about: ResultKey) -> str:
    return about.item.split(".", 1)[0].split("-", 1)[1]


def _broken(about: ResultKey, error: CorruptObject) -> Result:
    result = Result(((), {}), task_id=_task_id(about), topic=about.item.split(".", 1)[1])
    result.set_failure(FailureInformation.from_exception(error))
    result.complete = about.part is None
    return result
