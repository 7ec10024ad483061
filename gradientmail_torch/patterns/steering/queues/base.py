"""What all queues between a Thinker and its task servers have in common."""

from __future__ import annotations

import logging
import math
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import msgspec

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, MailboxUnavailable, NoTaskServer, RunTimeout, ThinkerFailed
from gradientmail_torch.patterns.steering.result import FailureInformation, ResourceRequirements, Result
from gradientmail_torch.patterns.steering.serialization import Method, check_method

log = logging.getLogger(__name__)

SLICE_S = 0.5
REPORT_EVERY_S = 30.0


class QueueRole(StrEnum):
    """Which side of a queue an object is used for."""

    ANY = "any"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A task server, as it presents itself."""

    server_id: str
    slots: int
    """Tasks that it runs at a time."""
    methods: tuple[str, ...] = ()
    host: str = ""


class TaskQueues(ABC):
    """Requests one way, results the other, by topic. Both sides may be used from many threads.

    Args:
        topics: labels that keep the results of different agents apart; ``default`` is always there.
        serialization_method: ``json`` (with safetensors for tensors and arrays) or ``pickle``.
        keep_inputs: whether results carry their inputs.
        outage_timeout: seconds that the queue may be away before what waits for it raises.
        server_timeout: seconds that :meth:`get_result` goes on without any task server before it raises
            :class:`~gradientmail_torch.errors.NoTaskServer`. None: it warns every half minute and waits.
    """

    def __init__(
        self,
        topics: Collection[str] = (),
        serialization_method: str = "json",
        keep_inputs: bool = True,
        *,
        server_timeout: float | None = None,
        outage_timeout: float = 600.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if isinstance(topics, str):
            raise ConfigError(f"topics must be a list of names, not the string {topics!r}")
        self.topics = frozenset(topics) | {"default"}
        self.serialization_method: Method = check_method(serialization_method)
        self.keep_inputs = keep_inputs
        self.role = QueueRole.ANY
        self.clock = clock
        self._server_timeout = server_timeout
        self._outage_timeout = outage_timeout
        self._reset()

    def _reset(self) -> None:
        """What belongs to this process alone."""
        self._lock = threading.Lock()
        self._active: dict[str, str] = {}  # topic by task ID
        self._idle = threading.Event()
        self._idle.set()
        self._abandoned: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        process_own = ("_lock", "_active", "_idle", "_abandoned")
        return {name: value for name, value in self.__dict__.items() if name not in process_own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the Thinker's side ---------------------------------------------------------------------------

    def send_inputs(
        self,
        *input_args: Any,
        method: str | None = None,
        input_kwargs: Mapping[str, Any] | None = None,
        keep_inputs: bool | None = None,
        resources: ResourceRequirements | Mapping[str, Any] | None = None,
        topic: str = "default",
        task_info: Mapping[str, Any] | None = None,
        max_retries: int = 0,
    ) -> str:
        """Ask for ``method`` to be run. Returns the task's ID.

        Args:
            *input_args: its positional arguments.
            input_kwargs: its keyword arguments.
            keep_inputs: whether the result carries the inputs; None: as the queue says.
            resources: what it needs, for the clusters that care; ``walltime_s`` is kept to everywhere.
            topic: under which the result comes back.
            task_info: plain JSON values that come back with the result.
            max_retries: how often it may raise and be run again. A node that dies is no failure of the task.
        """
        self._check_role(QueueRole.CLIENT, "send_inputs")
        self._check_topic(topic)
        task = Result(
            (input_args, dict(input_kwargs or {})),
            method=method,
            keep_inputs=self.keep_inputs if keep_inputs is None else keep_inputs,
            serialization_method=self.serialization_method,
            task_info=dict(task_info or {}),
            resources=_requirements(resources),
            topic=topic,
            max_retries=max_retries,
        )
        task.mark("created", self.clock)
        task.time.serialize_inputs = task.serialize(self.clock)
        self._submit(task, topic)
        return task.task_id

    def _submit(self, task: Result, topic: str) -> None:
        self._register(task.task_id, topic)  # before it is sent: the result may be quicker than our return
        try:
            self._send_request(task)
        except BaseException:
            self._finished(task.task_id)
            raise

    def get_result(self, topic: str = "default", timeout: float | None = None) -> Result:
        """The next result of ``topic``, in the order in which they arrive; with ``complete=False`` an intermediate one.

        Raises :class:`TimeoutError` after ``timeout`` seconds, and ``NoTaskServer`` as the queue's settings say.
        """
        self._check_role(QueueRole.CLIENT, "get_result")
        self._check_topic(topic)
        return self._received(self._wait_for_result(topic, timeout))

    def _wait_for_result(self, topic: str, timeout: float | None) -> Result:
        _check_timeout(timeout)
        began = answered = self.clock.monotonic()
        vigil = _Vigil(self, self._server_timeout)
        while True:
            left = SLICE_S if timeout is None else began + timeout - self.clock.monotonic()
            wait_s = min(max(left, 0.0), SLICE_S)
            try:
                found = self._take_result(topic, wait_s)
                if found is not None:
                    return found
                vigil.look()
                answered = self.clock.monotonic()
            except MailboxUnavailable as error:
                if self.clock.monotonic() - answered > self._outage_timeout:
                    raise
                log.warning("%r does not answer, waiting for it: %s", self, error)
                self.clock.sleep(wait_s)
            if self._abandoned is not None:
                raise ThinkerFailed("another agent of the Thinker has failed, so nobody waits any more") from self._abandoned
            if left <= 0:
                raise RunTimeout(f"no result of topic {topic!r} within {timeout:g} s; {self.active_count} tasks are under way in {self!r}")

    def _received(self, result: Result) -> Result:
        try:
            result.time.deserialize_results = result.deserialize(self.clock)
        except CorruptObject as error:  # the task has ended all the same, and somebody waits for it
            result.inputs = ((), {})
            result.set_failure(FailureInformation.from_exception(error))
        result.mark("result_received", self.clock)
        self._settle(result)
        return result

    def _settle(self, result: Result) -> None:
        if result.complete is not False:
            self._finished(result.task_id)

    @property
    def active_count(self) -> int:
        """Number of tasks that were asked for and have not come back."""
        with self._lock:
            return len(self._active)

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait until every task has come back, at most ``timeout`` seconds; True when so. Somebody else must get the results."""
        self._check_role(QueueRole.CLIENT, "wait_until_done")
        return self.clock.wait(self._idle, timeout)

    def ack(self, result: Result) -> None:
        """Say that ``result`` has been dealt with, so that a restarted Thinker will not see it again."""
        self._ack(result)

    def abandon(self, error: BaseException | None) -> None:
        """Let everybody who waits for a result raise instead, since ``error`` has ended the Thinker. None: as before."""
        self._abandoned = error

    @abstractmethod
    def cancel(self, task_id: str) -> bool:
        """Do not run this task, or stop running it. Its result comes back as failed. False when it has ended already."""

    @abstractmethod
    def recover(self) -> list[str]:
        """After a restart: take over the tasks that an earlier Thinker asked for and has not dealt with. Returns their IDs."""

    @abstractmethod
    def servers(self) -> list[ServerInfo]:
        """The task servers that are there."""

    @abstractmethod
    def send_kill_signal(self, drain: bool = True) -> None:
        """Tell all task servers to stop. What runs is finished; so is what waits, unless ``drain`` is False."""

    @abstractmethod
    def flush(self) -> None:
        """Remove all requests and results. Nobody may be using the queue."""

    # --- the server's side ----------------------------------------------------------------------------

    def get_task(self, timeout: float | None = None) -> tuple[str, Result]:
        """The topic and the next task, serialized. Raises :class:`TimeoutError`, and ``KillSignal`` when told to stop."""
        self._check_role(QueueRole.SERVER, "get_task")
        _check_timeout(timeout)
        began = self.clock.monotonic()
        while True:
            left = SLICE_S if timeout is None else began + timeout - self.clock.monotonic()
            task = self._take_task(min(max(left, 0.0), SLICE_S))
            if task is not None:
                task.mark("input_received", self.clock)
                topic = task.topic or "default"
                self.topics |= {topic}  # whoever has asked for it waits there, whether this side was told of the topic or not
                return topic, task
            if left <= 0:
                raise RunTimeout(f"no task within {timeout:g} s in {self!r}")

    def send_result(self, result: Result) -> None:
        """Send a result back, serialized or not. Raises ``WorkFenced`` when another server has ended the task.

        A value that the queue cannot take, since it is too large, makes the task one that has failed.
        """
        self._check_role(QueueRole.SERVER, "send_result")
        self._check_topic(result.topic or "default")
        result.mark("result_sent", self.clock)
        result.serialize(self.clock)
        try:
            self._send_result(result)
        except ConfigError as error:
            if result.complete is False:  # whoever streams it is still there to hear of it
                raise
            log.warning("the result of task %s cannot be sent: %s", result.task_id, error)
            result.set_failure(FailureInformation.from_exception(error))
            self._send_result(result)

    @abstractmethod
    def for_server(self, info: ServerInfo) -> TaskQueues:
        """A server's end of this queue, made known to the Thinker. Close it when the server ends."""

    @abstractmethod
    def give_back(self, task: Result) -> None:
        """Hand a task back unfinished, for another server to run."""

    @abstractmethod
    def is_revoked(self, task: Result) -> bool:
        """Whether a running task's result is no longer wanted from this server: cancelled, or taken over by another."""

    def ready(self, task: Result) -> Result:
        """``task`` with its inputs at hand; may take long. Raises ``CorruptObject``."""
        return task

    def open(self) -> None:  # noqa: B027
        """Begin to answer other processes, where this one is to do that."""

    def tend(self) -> None:  # noqa: B027  # most have nothing to do
        """Called now and then by a server that has no room for another task."""

    def close(self) -> None:  # noqa: B027
        """End threads and connections of this object."""

    # --- what a queue must bring ----------------------------------------------------------------------

    @abstractmethod
    def _send_request(self, task: Result) -> None: ...

    @abstractmethod
    def _take_result(self, topic: str, wait_s: float) -> Result | None:
        """The next result, serialized; waits about ``wait_s`` seconds for one."""

    @abstractmethod
    def _take_task(self, wait_s: float) -> Result | None:
        """The next task, serialized; waits about ``wait_s`` seconds for one. Raises ``KillSignal``."""

    @abstractmethod
    def _send_result(self, result: Result) -> None: ...

    def _ack(self, result: Result) -> None:  # noqa: B027  # a queue in memory has nothing to remember
        pass

    # --- bookkeeping ----------------------------------------------------------------------------------

    def set_role(self, role: QueueRole | str) -> None:
        """Say which side this object is used for: using the other one is warned of."""
        try:
            self.role = QueueRole(role)
        except ValueError:
            raise ConfigError(f"role must be 'client', 'server' or 'any', not {role!r}") from None

    def _check_role(self, allowed: QueueRole, operation: str) -> None:
        if self.role not in (QueueRole.ANY, allowed):
            warnings.warn(f"{operation} is meant for the {allowed} of a queue, and this is its {self.role}", stacklevel=3)

    def _check_topic(self, topic: str) -> None:
        if topic not in self.topics:
            raise ConfigError(f"unknown topic {topic!r}: {self!r} has {', '.join(sorted(self.topics))}; name it in topics=[…]")

    def _register(self, task_id: str, topic: str) -> None:
        with self._lock:
            self._active[task_id] = topic
            self._idle.clear()

    def _finished(self, task_id: str) -> None:
        with self._lock:
            self._active.pop(task_id, None)
            if not self._active:
                self._idle.set()

    def __repr__(self) -> str:
        return type(self).__name__


class _Vigil:
    """Notices, while results are waited for, that nobody is there to send any."""

    def __init__(self, queues: TaskQueues, limit_s: float | None) -> None:
        self._queues = queues
        self._limit_s = limit_s
        self._every_s = REPORT_EVERY_S if limit_s is None else min(REPORT_EVERY_S, limit_s / 4)
        self._alone_since = self._looked_at = queues.clock.monotonic()

    def look(self) -> None:
        now = self._queues.clock.monotonic()
        if now - self._looked_at < self._every_s or not self._queues.active_count:
            return
        self._looked_at = now
        if self._queues.servers():
            self._alone_since = now
            return
        alone_s = now - self._alone_since
        text = (
            f"{self._queues.active_count} tasks wait in {self._queues!r}, and no task server has been there for {alone_s:.0f} s: start one"
        )
        if self._limit_s is not None and alone_s >= self._limit_s:
            raise NoTaskServer(f"{text}, or look why the last one has died")
        log.warning("%s", text)


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and math.isnan(timeout):
        raise ConfigError(f"timeout must be None or a number of seconds, not {timeout!r}: it would never come")


def _requirements(given: ResourceRequirements | Mapping[str, Any] | None) -> ResourceRequirements:
    if isinstance(given, ResourceRequirements):
        return given
    try:
        return msgspec.convert(dict(given or {}), ResourceRequirements)
    except msgspec.ValidationError as error:
        raise ConfigError(f"resources: {error}") from error
