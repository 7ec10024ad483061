"""What runs the tasks of a server: slots, each a thread with a process of its own, or without one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from gradientmail_torch.clock import Clock, Task
from gradientmail_torch.errors import ConfigError, CorruptObject, MailboxUnavailable, WorkFenced
from gradientmail_torch.patterns.steering.methods import Method, execute, unknown
from gradientmail_torch.patterns.steering.queues.base import TaskQueues
from gradientmail_torch.patterns.steering.result import FailureInformation, Result, WorkerInformation
from gradientmail_torch.patterns.steering.servers.child import Child, ChildDied, Job

log = logging.getLogger(__name__)

T = TypeVar("T")
Isolation = Literal["process", "thread"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How tasks are run."""

    isolation: Isolation = "process"
    fresh: bool = True
    """A new process for every task; otherwise one process runs many."""
    spare: bool = False
    """With ``fresh``: have the next process import what it needs while a task runs."""
    start_method: str = "spawn"
    walltime_s: float | None = None
    """Seconds after which a task is killed. A task's own limit goes first."""
    watch_interval_s: float = 5.0
    """Seconds between two looks whether a running task is still wanted."""
    outage_timeout_s: float = 600.0
    """Seconds for which a finished result is offered to a queue that does not answer."""

    def __post_init__(self) -> None:
        if self.isolation not in ("process", "thread"):
            raise ConfigError(f"isolation must be 'process' or 'thread', not {self.isolation!r}")
        if self.isolation == "thread" and self.walltime_s is not None:
            raise ConfigError("a thread cannot be killed, so walltime_s needs isolation='process'")


class Slot:
    """Runs one task at a time, in a thread of its own, and sends back its result. Tells ``freed`` when it has room."""

    def __init__(
        self,
        number: int,
        methods: Mapping[str, Method],
        queues: TaskQueues,
        settings: Settings,
        *,
        server: str,
        freed: threading.Event,
        clock: Clock,
    ) -> None:
        self._methods = methods
        self._queues = queues
        self._settings = settings
        self._server = server
        self._freed = freed
        self._clock = clock
        self._child: Child | None = None
        self._given: Result | None = None
        self._begin = threading.Event()
        self._closing = False
        self._leaving = False
        self.failure: BaseException | None = None
        """What has ended this slot, where it is not the fault of a task."""
        self._prepare()
        self._thread: Task = clock.spawn(self._work, name=f"steering slot {number} of {server}")

    @property
    def busy(self) -> bool:
        return self._given is not None

    def give(self, task: Result) -> None:
        self._given = task
        self._begin.set()

    def leave(self) -> None:
        """Stop running the task, if there is one, and give it back."""
        self._leaving = True

    def close(self) -> None:
        """Wait for the task, and end thread and process."""
        self._closing = True
        self._begin.set()
        self._thread.join()
        if self._child is not None:
            self._child.close()
            self._child = None

    # --- in the slot's thread -------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._clock.wait(self._begin)
            self._begin.clear()
            task = self._given
            if task is not None:
                try:
                    self._attend(task)
                except BaseException as error:
                    self.failure = error
                self._given = None
                self._freed.set()
            if self._closing:
                return

    def _attend(self, task: Result) -> None:
        """Run ``task`` as often as it may be retried, and send what came out."""
        inputs = task.inputs  # a retry begins with what was asked for, whatever the last try has left
        while True:
            task.mark("start_task_submission", self._clock)
            try:
                result = self._outcome(task)
            except _Stopped as reason:
                log.info("task %s is not run to its end: %s", task.task_id, reason)
                self._queues.give_back(task)
                return
            result.mark("task_received", self._clock)
            result.inputs = inputs if result.keep_inputs else ((), {})
            if result.success or result.retries >= result.max_retries:
                break
            log.warning("task %s has failed, and is tried again: %s", task.task_id, result.failure_info and result.failure_info.exception)
            task.retries += 1
        self._send(result)

    def _outcome(self, task: Result) -> Result:
        """The result of one run of a copy of ``task``, which is left as it is."""
        attempt = task.worker_info.attempt if task.worker_info else None
        run = task.copy()
        method = self._methods.get(task.method or "")
        if method is None:
            run.set_failure(unknown(task, self._methods))
            return run
        try:
            run = self._patiently(partial(self._queues.ready, run))
            if self._settings.isolation == "thread":
                worker = WorkerInformation(server=self._server, attempt=attempt)
                return execute(method, run, emit=lambda part: self._stream(part, task), worker=worker, clock=self._clock)
            return self._in_child(run, task, Job(self._server, attempt))
        except (ChildDied, ConfigError, CorruptObject, _Overrun) as error:
            run.set_failure(FailureInformation(exception=f"{type(error).__name__.lstrip('_')}: {error}"))
            run.worker_info = WorkerInformation(server=self._server, attempt=attempt)
            return run

    def _in_child(self, run: Result, task: Result, job: Job) -> Result:
        self._prepare()
        child = self._child
        assert child is not None
        self._child = None  # unless it proves to be of further use
        watch = _Watch(self, task)
        try:
            child.await_ready(watch.check)
            if self._settings.spare:
                self._prepare()
            result = child.run(run, job=job, emit=lambda part: self._stream(part, task), check=watch.check)
            if self._settings.fresh:
                child.close()
            else:
                self._child = child
            return result
        except BaseException:  # what it streams may be more than the queue takes, and it goes on
            child.kill()
            raise
        finally:
            self._prepare()

    def _prepare(self) -> None:
        ending = self._closing or self._leaving
        if self._settings.isolation == "process" and self._child is None and not ending:
            self._child = Child(self._methods, start_method=self._settings.start_method)

    def _stream(self, part: Result, task: Result) -> None:
        part.inputs = task.inputs if part.keep_inputs else ((), {})
        self._send(part)

    def _send(self, result: Result) -> None:
        try:
            self._patiently(partial(self._queues.send_result, result))
        except WorkFenced as error:
            log.info("%s", error)

    def _patiently(self, operation: Callable[[], T]) -> T:
        """Do ``operation``; a queue that does not answer is given time, since a task, or its result, is at stake."""
        began = self._clock.monotonic()
        while True:
            try:
                return operation()
            except MailboxUnavailable as error:
                if self._clock.monotonic() - began >= self._settings.outage_timeout_s:
                    raise
                log.warning("%s waits for the queue to answer: %s", self._server, error)
                self._clock.sleep(1.0)


class _Overrun(Exception):
    """The task ran over its wall time: it has failed."""


class _Stopped(Exception):
    """The task need not, or must not, be run here any more."""


class _Watch:
    """Sees whether a running task shall be stopped."""

    def __init__(self, slot: Slot, task: Result) -> None:
        self._slot = slot
        self._task = task
        self._limit_s = task.resources.walltime_s or slot._settings.walltime_s
        self._began = self._looked_at = slot._clock.monotonic()

    def check(self) -> None:
        now = self._slot._clock.monotonic()
        if self._slot._leaving:
            raise _Stopped("the server is leaving")
        if self._limit_s is not None and now - self._began >= self._limit_s:
            raise _Overrun(f"it ran over its wall time of {self._limit_s:g} s")
        if now - self._looked_at < self._slot._settings.watch_interval_s:
            return
        self._looked_at = now
        try:
            revoked = self._slot._queues.is_revoked(self._task)
        except MailboxUnavailable:  # the lease may still hold, and the result is checked in any case
            return
        if revoked:
            raise _Stopped("it was cancelled, or another server has taken it over")
