"""Queues over a Redis server (extra ``[redis]``): quick, for machines that share a network.

Requests and results are Redis streams. A server's claim on a task is its entry in the stream's pending list, whose
idle time Redis measures by its own clock; sending a result checks and ends that claim in one step.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import msgspec

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock, Task
from gradientmail_torch.errors import ConfigError, CorruptObject, KillSignal, MailboxError, MailboxUnavailable, WorkFenced
from gradientmail_torch.patterns.steering.queues.base import QueueRole, ServerInfo, TaskQueues
from gradientmail_torch.patterns.steering.result import FailureInformation, Result, WorkerInformation
from gradientmail_torch.patterns.steering.wire import pack, unpack

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 500 << 20
_GROUP, _NOBODY = "servers", "nobody"
_THINKER = "thinker"

# KEYS: requests, results. ARGV: entry, consumer ("" for whoever has it), last (1 or 0), task ID, message.
_SEND = """
local held = redis.call('XPENDING', KEYS[1], 'servers', ARGV[1], ARGV[1], 1)
if ARGV[2] ~= '' and (#held == 0 or held[1][2] ~= ARGV[2]) then return 0 end
if ARGV[3] == '1' then
  redis.call('XACK', KEYS[1], 'servers', ARGV[1])
  if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
end
redis.call('XADD', KEYS[2], '*', 'task', ARGV[4], 'last', ARGV[3], 'message', ARGV[5])
return 1
"""
# KEYS: requests. ARGV: consumer, new consumer, idle time in ms, entries… Only what the first consumer holds.
_HOLD = """
local kept = 0
for place = 4, #ARGV do
  local held = redis.call('XPENDING', KEYS[1], 'servers', ARGV[place], ARGV[place], 1)
  if #held > 0 and held[1][2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], 'servers', ARGV[2], 0, ARGV[place], 'IDLE', ARGV[3], 'JUSTID')
    kept = kept + 1
  end
end
return kept
"""


class RedisQueues(TaskQueues):
    """Queues in a Redis server, version 6.2 or newer.

    Nothing is lost when the Thinker or a server dies: tasks of a server that is silent for ``lease`` seconds go to
    another, and results stay until they are acknowledged (see :meth:`recover`).

    Args:
        topics: labels that keep the results of different agents apart.
        hostname, port, password: of the Redis server.
        prefix: of all keys; Thinker and servers give the same. None: one of its own, for servers that are given this object.
        serialization_method: ``json``; ``pickle`` lets everyone who can write to the Redis server run code on every machine.
        max_attempts: servers that may die on a task before it counts as failed.
        auto_ack: whether :meth:`get_result` acknowledges what it returns.
    """

    def __init__(
        self,
        topics: Collection[str] = (),
        hostname: str = "127.0.0.1",
        port: int = 6379,
        prefix: str | None = None,
        serialization_method: str = "json",
        keep_inputs: bool = True,
        *,
        password: str | None = None,
        lease: float = 30.0,
        max_attempts: int = 3,
        auto_ack: bool = True,
        server_timeout: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.hostname, self.port = hostname, port
        self.prefix = prefix or f"steering-{uuid4().hex}"
        self._password = password
        self._lease = lease
        self._max_attempts = max_attempts
        self._auto_ack = auto_ack
        self._info: ServerInfo | None = None
        super().__init__(topics, serialization_method, keep_inputs, server_timeout=server_timeout, clock=clock)
        self._prepare()

    def _reset(self) -> None:
        super()._reset()
        self._redis = _connect(self.hostname, self.port, self._password)
        self._consumer = uuid4().hex
        self._entries: dict[str, str] = {}  # what this server holds: stream entry by task ID
        self._again: dict[str, deque[tuple[str, dict[bytes, bytes]]]] = {}  # results that come again, by topic
        self._unacked: dict[str, list[tuple[str, str, bool]]] = {}  # topic, entry and whether the last, by task ID
        self._keeper: _Keeper | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = ("_redis", "_entries", "_again", "_unacked", "_keeper")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __repr__(self) -> str:
        return f"queue {self.prefix!r} at redis://{self.hostname}:{self.port}"

    def _key(self, *parts: str) -> str:
        return ":".join((self.prefix, *parts))

    def _prepare(self) -> None:
        """Make the streams, unless they are there."""
        with self._translated():
            streams = [(self._key("requests"), _GROUP), *((self._key("results", topic), _THINKER) for topic in self.topics)]
            for stream, group in streams:
                try:
                    self._redis.xgroup_create(stream, group, id="0", mkstream=True)
                except _redis().ResponseError as error:
                    if "BUSYGROUP" not in str(error):
                        raise

    # --- the Thinker's side ---------------------------------------------------------------------------

    def _send_request(self, task: Result) -> None:
        message = self._message(task)
        with self._translated():
            steps = self._redis.pipeline(transaction=True)
            steps.delete(self._key("stop"))
            steps.hset(self._key("tasks"), task.task_id, task.topic or "default")
            steps.xadd(self._key("requests"), {"message": message})
            entry: bytes = steps.execute()[-1]
            self._redis.hset(self._key("entries"), task.task_id, entry)

    def get_result(self, topic: str = "default", timeout: float | None = None) -> Result:
        result = super().get_result(topic, timeout)
        if self._auto_ack:
            self.ack(result)
        return result

    def _take_result(self, topic: str, wait_s: float) -> Result | None:
        with self._lock:
            again = self._again.get(topic)
            found = again.popleft() if again else None
        if found is None:
            found = self._read(self._key("results", topic), _THINKER, _THINKER, wait_s)
        if found is None:
            return None
        entry, fields = found
        task_id, last = fields[b"task"].decode(), fields[b"last"] == b"1"
        with self._lock:
            self._unacked.setdefault(task_id, []).append((topic, entry, last))
        try:
            return unpack(fields[b"message"], allow_pickle=self.serialization_method == "pickle")
        except CorruptObject as error:
            result = Result(((), {}), task_id=task_id, topic=topic)
            result.set_failure(FailureInformation.from_exception(error))
            result.complete = last
            return result

    def _ack(self, result: Result) -> None:
        with self._lock:
            found = self._unacked.pop(result.task_id, [])
        with self._translated():
            steps = self._redis.pipeline(transaction=True)
            for topic, entry, last in found:
                steps.xack(self._key("results", topic), _THINKER, entry)
                steps.xdel(self._key("results", topic), entry)
                if last:
                    steps.hdel(self._key("tasks"), result.task_id)
                    steps.hdel(self._key("entries"), result.task_id)
            steps.execute()

    def cancel(self, task_id: str) -> bool:
        with self._translated():
            entry = self._redis.hget(self._key("entries"), task_id)
            found = self._redis.xrange(self._key("requests"), entry, entry) if entry else []
            if not found:
                return False
            task = unpack(found[0][1][b"message"], allow_pickle=True)
            task.set_failure(FailureInformation(exception="the task was cancelled"))
            return self._commit(entry.decode(), "", task)

    def recover(self) -> list[str]:
        with self._translated():
            tasks = {task_id.decode(): topic.decode() for task_id, topic in self._redis.hgetall(self._key("tasks")).items()}
            for topic in self.topics:
                again = self._redis.xautoclaim(self._key("results", topic), _THINKER, _THINKER, 0, count=1 << 20)[1]
                with self._lock:
                    self._again[topic] = deque((entry.decode(), fields) for entry, fields in again if fields)
        for task_id, topic in tasks.items():
            self._register(task_id, topic)
        return list(tasks)

    def servers(self) -> list[ServerInfo]:
        with self._translated():
            keys = list(self._redis.scan_iter(self._key("server", "*")))
            found = self._redis.mget(keys) if keys else []
        return [msgspec.json.decode(data, type=ServerInfo) for data in found if data]

    def send_kill_signal(self, drain: bool = True) -> None:
        self._check_role(QueueRole.CLIENT, "send_kill_signal")
        with self._translated():
            self._redis.set(self._key("stop"), "drain" if drain else "now")

    def flush(self) -> None:
        with self._translated():
            for key in self._redis.scan_iter(self._key("*")):
                self._redis.delete(key)
        self._prepare()
        for task_id in list(self._active):
            self._finished(task_id)

    # --- the server's side ----------------------------------------------------------------------------

    def for_server(self, info: ServerInfo) -> RedisQueues:
        end = type(self).__new__(type(self))
        end.__dict__.update(self.__getstate__(), role=QueueRole.SERVER, _info=info)
        end._reset()
        end._keeper = _Keeper(end, info)
        return end

    def _take_task(self, wait_s: float) -> Result | None:
        with self._translated():
            stop = self._redis.get(self._key("stop"))
            if stop == b"now":
                raise KillSignal("the task servers of this queue have been told to stop, and to leave what waits")
            lease_ms = int(self._lease * 1000)
            taken = self._redis.xautoclaim(self._key("requests"), _GROUP, self._consumer, lease_ms, count=1)[1]
        if taken and taken[0][1]:
            return self._opened(taken[0][0].decode(), taken[0][1])
        found = self._read(self._key("requests"), _GROUP, self._consumer, 0.0 if stop else wait_s)
        if found is not None:
            return self._opened(*found)
        if stop:
            raise KillSignal("the task servers of this queue have been told to stop")
        return None

    def _opened(self, entry: str, fields: dict[bytes, bytes]) -> Result | None:
        with self._translated():
            pending = self._redis.xpending_range(self._key("requests"), _GROUP, entry, entry, 1)
        attempt = pending[0]["times_delivered"] if pending else 1
        try:
            task = unpack(fields[b"message"], allow_pickle=self.serialization_method == "pickle")
        except CorruptObject as error:
            task = unpack(fields[b"message"], allow_pickle=True)  # read, and not deserialized: nothing in it is run
            task.set_failure(FailureInformation.from_exception(error))
        if attempt > self._max_attempts:
            text = f"{self._max_attempts} task servers took this task, and each of them died, lost its lease or gave it back"
            task.set_failure(FailureInformation(exception=text))
        if task.failure_info is not None:
            self._commit(entry, self._consumer, task)
            return None
        task.worker_info = WorkerInformation(attempt=attempt)
        with self._lock:
            self._entries[task.task_id] = entry
        return task

    def _send_result(self, result: Result) -> None:
        with self._lock:
            entry = self._entries.get(result.task_id, "")
        if not entry or not self._commit(entry, self._consumer, result):
            raise WorkFenced(f"task {result.task_id} was cancelled, or another server has taken it over: this result was refused")
        if result.complete is not False:
            self._let_go(result.task_id)

    def give_back(self, task: Result) -> None:
        entry = self._let_go(task.task_id)
        if entry:
            self._hold([entry], _NOBODY, idle_ms=10**9)

    def is_revoked(self, task: Result) -> bool:
        with self._lock:
            entry = self._entries.get(task.task_id)
        return entry is None or not self._hold([entry], self._consumer, idle_ms=0)

    def _hold(self, entries: list[str], consumer: str, *, idle_ms: int) -> int:
        """Make ``consumer`` the holder of those of ``entries`` that this server holds; returns how many."""
        with self._translated():
            return int(self._redis.eval(_HOLD, 1, self._key("requests"), self._consumer, consumer, str(idle_ms), *entries))

    def _commit(self, entry: str, consumer: str, result: Result) -> bool:
        last = "0" if result.complete is False else "1"
        keys = (self._key("requests"), self._key("results", result.topic or "default"))
        with self._translated():
            return bool(self._redis.eval(_SEND, 2, *keys, entry, consumer, last, result.task_id, self._message(result)))

    def _let_go(self, task_id: str) -> str | None:
        with self._lock:
            return self._entries.pop(task_id, None)

    def close(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()
        self._redis.close()

    # --- the server -----------------------------------------------------------------------------------

    def _read(self, stream: str, group: str, consumer: str, wait_s: float) -> tuple[str, dict[bytes, bytes]] | None:
        """The next entry that nobody in ``group`` has read."""
        block_ms = int(wait_s * 1000) or None  # 0 would be for ever
        with self._translated():
            found = self._redis.xreadgroup(group, consumer, {stream: ">"}, count=1, block=block_ms)
        if not found:
            return None
        entries = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        entry, fields = entries[0]
        return entry.decode(), fields

    @staticmethod
    def _message(result: Result) -> bytes:
        message = pack(result)
        if len(message) > MAX_MESSAGE_BYTES:
            raise ConfigError(f"a message of {len(message)} bytes is more than Redis takes ({MAX_MESSAGE_BYTES}): use MailboxQueues")
        return message

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what redis raises into an error of our tree."""
        redis = _redis()
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise MailboxUnavailable(
                f"no answer from the Redis server of {self!r}: {error}. Is it running, and is the port right?"
            ) from error
        except redis.RedisError as error:
            raise MailboxError(f"the Redis server of {self!r} says: {error}") from error


RedisQueue = RedisQueues


class _Keeper:
    """Says that a server is there, and keeps what it holds from being taken over."""

    def __init__(self, queues: RedisQueues, info: ServerInfo) -> None:
        self._queues = queues
        self._info = info
        self._ending = threading.Event()
        self._say()
        self._task: Task = queues.clock.spawn(self._run, name=f"steering presence of {info.server_id}")

    def close(self) -> None:
        self._ending.set()
        self._task.join()
        queues = self._queues
        try:
            if entries := list(queues._entries.values()):
                queues._hold(entries, _NOBODY, idle_ms=10**9)
            with queues._translated():
                queues._redis.delete(queues._key("server", self._info.server_id))
        except MailboxError as error:
            log.warning("%s cannot say that it is leaving: %s", self._info.server_id, error)

    def _run(self) -> None:
        while not self._queues.clock.wait(self._ending, self._queues._lease / 5):
            try:
                self._say()
            except MailboxError as error:  # the next one may get through
                log.warning("no heartbeat of %s: %s", self._info.server_id, error)

    def _say(self) -> None:
        queues = self._queues
        with queues._translated():
            queues._redis.set(queues._key("server", self._info.server_id), msgspec.json.encode(self._info), px=int(queues._lease * 1000))
        with queues._lock:
            entries = list(queues._entries.values())
        if entries:
            queues._hold(entries, queues._consumer, idle_ms=0)


def _redis() -> Any:
    try:
        import redis
    except ImportError as error:
        raise ConfigError("RedisQueues need the package redis: pip install 'gradientmail-torch[redis]'") from error
    return redis


def _connect(hostname: str, port: int, password: str | None) -> Any:  # its own types do not say what comes back
    redis = _redis()
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    # One try on a new connection, where the old one has been closed; a server that is away is the caller's business.
    return redis.Redis(host=hostname, port=port, password=password, socket_connect_timeout=10, retry=Retry(NoBackoff(), 1))
