"""A task server for clusters: Parsl (extra ``[parsl]``) runs the tasks, on whatever its configuration names."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, MailboxUnavailable, WorkFenced
from gradientmail_torch.patterns.steering.methods import Method, execute, unknown
from gradientmail_torch.patterns.steering.queues.base import TaskQueues
from gradientmail_torch.patterns.steering.result import FailureInformation, Result, WorkerInformation
from gradientmail_torch.patterns.steering.servers.base import Engine, TaskServer
from gradientmail_torch.patterns.steering.wire import pack, unpack

log = logging.getLogger(__name__)

MethodOrOptions = Method | tuple[Method, Mapping[str, Any]]


class ParslTaskServer(TaskServer):
    """Runs tasks through Parsl.

    Args:
        methods: functions; or pairs of a function and options of Parsl's ``python_app``, such as ``{"executors": ["gpu"]}``.
        queues: where the tasks come from.
        config: a ``parsl.Config``; or, which every start method can take along, a function that makes one.
        slots: tasks in Parsl's hands at a time. Give it for queues that other servers share.
        default_executors: labels of the executors for methods without options; "all" of them.

    A generator's values come back together with its last result: Parsl has no way for parts.
    """

    def __init__(
        self,
        methods: Iterable[MethodOrOptions],
        queues: TaskQueues,
        config: Any,
        timeout: float | None = None,
        default_executors: str | list[str] = "all",
        *,
        slots: int = 10_000,
        start_method: str = "spawn",
    ) -> None:
        _parsl()
        listed = list(methods) if isinstance(methods, Iterable) else methods
        functions = [method[0] if isinstance(method, (tuple, list)) else method for method in listed]
        super().__init__(functions, queues, slots=slots, timeout=timeout, start_method=start_method)
        default = {"executors": default_executors}
        self._options = {
            function.__name__: dict(method[1]) if isinstance(method, (tuple, list)) else default
            for function, method in zip(functions, listed, strict=True)
        }
        self._recipe = config if callable(config) else _Recipe(config)

    def _engine(self, queues: TaskQueues, clock: Clock) -> Engine:
        return _ParslEngine(self.methods, self._options, queues, self._recipe(), slots=self.slots, server=self.name, clock=clock)


class _ParslEngine(Engine):
    def __init__(
        self,
        methods: Mapping[str, Method],
        options: Mapping[str, Mapping[str, Any]],
        queues: TaskQueues,
        config: Any,
        *,
        slots: int,
        server: str,
        clock: Clock,
    ) -> None:
        parsl = _parsl()
        self._queues = queues
        self._slots = slots
        self._server = server
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, Result] = {}
        self._freed = threading.Event()
        self._failure: BaseException | None = None
        self._leaving = False
        self._path = os.environ.get("PATH", "")
        # Parsl starts its helpers by name: they are beside this Python, also where its environment is not activated.
        os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), self._path))
        self._kernel = parsl.load(config)
        self._apps = {name: parsl.python_app(_Call(method), **options[name]) for name, method in methods.items()}

    def await_room(self, wait_s: float) -> bool:
        return self._await(self._slots, wait_s)

    def await_idle(self, wait_s: float) -> bool:
        return self._await(1, wait_s)

    def _await(self, below: int, wait_s: float) -> bool:
        """Whether fewer tasks than ``below`` are running."""
        self._freed.clear()
        if self._failure is not None:
            raise self._failure
        if len(self._running) >= below:
            self._clock.wait(self._freed, wait_s)
        return len(self._running) < below

    def give(self, task: Result) -> None:
        with self._lock:
            self._running[task.task_id] = task
        self._submit(task)

    def _submit(self, task: Result) -> None:
        task.mark("start_task_submission", self._clock)
        app = self._apps.get(task.method or "")
        attempt = task.worker_info.attempt if task.worker_info else None
        if app is None:
            task.set_failure(unknown(task, self._apps))
            self._deliver(task)
            return
        try:
            message = pack(self._queues.ready(task.copy()))
            future: Future[list[bytes]] = app(message, self._server, attempt)
        except CorruptObject as error:
            task.set_failure(FailureInformation.from_exception(error))
            self._deliver(task)
            return
        future.add_done_callback(lambda done: self._take_back(task, done))

    def _take_back(self, task: Result, future: Future[list[bytes]]) -> None:
        """Called by a thread of Parsl's."""
        try:
            error = future.exception()
            if error is not None:  # Parsl's own: a lost worker, a function that cannot be loaded
                result = task.copy()
                result.set_failure(FailureInformation.from_exception(error))
            else:
                *parts, result = (unpack(message, allow_pickle=True) for message in future.result())
                try:
                    for part in parts:
                        self._send(part, task)
                except ConfigError as reason:  # more than the queue takes
                    result.set_failure(FailureInformation.from_exception(reason))
            result.mark("task_received", self._clock)
            if not result.success and result.retries < result.max_retries and not self._leaving:
                task.retries += 1
                self._submit(task)
                return
            result.inputs = task.inputs if result.keep_inputs else ((), {})
            self._deliver(result)
        except BaseException as failure:
            self._failure = failure
            self._done(task)

    def _deliver(self, result: Result) -> None:
        try:
            self._send(result, result)
        finally:
            self._done(result)

    def _send(self, result: Result, task: Result) -> None:
        result.inputs = task.inputs if result.keep_inputs else ((), {})
        while True:
            try:
                self._queues.send_result(result)
                return
            except WorkFenced as error:
                log.info("%s", error)
                return
            except MailboxUnavailable as error:
                if self._leaving:
                    raise
                log.warning("a result waits for the queue to answer: %s", error)
                self._clock.sleep(1.0)

    def _done(self, task: Result) -> None:
        with self._lock:
            self._running.pop(task.task_id, None)
        self._freed.set()

    def leave(self) -> None:
        self._leaving = True
        with self._lock:
            left = list(self._running.values())
            self._running.clear()
        for task in left:
            self._queues.give_back(task)

    def close(self) -> None:
        parsl = _parsl()
        if not self._leaving:
            self._kernel.wait_for_current_tasks()
        self._kernel.cleanup()
        parsl.clear()
        os.environ["PATH"] = self._path


class _Call:
    """What a Parsl worker runs."""

    def __init__(self, method: Method) -> None:
        self._method: Any = method
        self.__name__ = method.__name__

    def __getstate__(self) -> dict[str, Any]:
        state = {"name": self.__name__, "method": self._method}
        if self._method.__module__ in ("__main__", "__mp_main__"):  # another program's main script, in a worker
            import dill

            state["method"] = dill.dumps(self._method, recurse=True)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__name__, self._method = state["name"], state["method"]
        if isinstance(self._method, bytes):
            import dill

            self._method = dill.loads(self._method)

    def __call__(self, message: bytes, server: str, attempt: int | None) -> list[bytes]:
        parts: list[bytes] = []
        worker = WorkerInformation(server=server, attempt=attempt)
        task = execute(self._method, unpack(message, allow_pickle=True), emit=lambda part: parts.append(pack(part)), worker=worker)
        return [*parts, pack(task)]


class _Recipe:
    """Gives a configuration. A ``parsl.Config`` holds locks; dill, which Parsl brings along, can take it to a new process."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __call__(self) -> Any:
        return self._config

    def __getstate__(self) -> dict[str, Any]:
        import dill

        return {"config": dill.dumps(self._config)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        import dill

        self._config = dill.loads(state["config"])


def _parsl() -> Any:
    try:
        return importlib.import_module("parsl")
    except ImportError as error:
        raise ConfigError("ParslTaskServer needs the package parsl: pip install 'gradientmail-torch[parsl]'") from error
