"""What a task server offers: functions by name, and one call of one of them."""

from __future__ import annotations

import inspect
import os
import platform
from collections.abc import Callable, Generator, Iterable
from typing import Any

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, GradientMailError
from gradientmail_torch.patterns.steering.result import FailureInformation, Result, WorkerInformation

Method = Callable[..., Any]
_TAGS = ("PARSL_WORKER_RANK", "PARSL_WORKER_POOL_ID", "CUDA_VISIBLE_DEVICES")


def by_name(methods: Iterable[Method]) -> dict[str, Method]:
    """The functions under the names by which tasks ask for them. Raises :class:`ConfigError`."""
    found: dict[str, Method] = {}
    if not isinstance(methods, Iterable):
        raise ConfigError(f"methods must be a list of functions, not {type(methods).__name__}: the order is (methods, queues, …)")
    for method in methods:
        name = getattr(method, "__name__", None)
        if not callable(method) or not isinstance(name, str):
            raise ConfigError(f"a method must be a function with a name, not {method!r}")
        if name in found:
            raise ConfigError(f"two methods are called {name!r}: tasks could not tell them apart")
        found[name] = method
    if not found:
        raise ConfigError("a task server needs at least one method")
    return found


def unknown(task: Result, methods: Iterable[str]) -> FailureInformation:
    error = ConfigError(f"method {task.method!r} is not offered here; these are: {', '.join(sorted(methods))}")
    return FailureInformation.from_exception(error)


def execute(
    method: Method,
    task: Result,
    *,
    emit: Callable[[Result], object],
    worker: WorkerInformation | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Result:
    """Run a serialized task and return it, serialized, with its outcome. Never raises: a failure is an outcome.

    A generator's values are handed to ``emit``, each as an intermediate result; what it returns is the value. So
    are the values for which a function calls its parameter ``_emit``, say from a callback of a Trainer. One with a
    parameter ``_result`` gets the task, with ``_resources`` what the task asked for. Inputs that are to be kept are
    not written again.
    """
    task.mark("compute_started", clock)
    task.worker_info = worker or task.worker_info or WorkerInformation()
    task.worker_info.hostname, task.worker_info.pid = platform.node(), os.getpid()
    task.worker_info.tags |= {tag: os.environ[tag] for tag in _TAGS if tag in os.environ}
    inputs = task.inputs
    try:
        task.time.deserialize_inputs = task.deserialize(clock)
        began = clock.monotonic()
        try:
            value = _call(method, task, emit, inputs, clock)
        finally:
            task.time.running = clock.monotonic() - began
        task.set_result(value, task.time.running)
    except BaseException as error:  # SystemExit too: whatever the function does, somebody waits for its result
        task.set_failure(FailureInformation.from_exception(error))
    task.mark("compute_ended", clock)
    return _serialized(task, inputs, clock)


def _call(method: Method, task: Result, emit: Callable[[Result], object], inputs: Any, clock: Clock) -> Any:
    began = clock.monotonic()

    def stream(value: Any) -> None:
        part = task.copy()
        part.set_result(value, clock.monotonic() - began, intermediate=True)
        part.mark("compute_ended", clock)
        part.inputs = inputs if task.keep_inputs else ((), {})
        part.time.serialize_results = part.serialize(clock)
        emit(part)

    wanted = inspect.signature(method).parameters if _has_signature(method) else {}
    offered = {"_result": task, "_resources": task.resources, "_emit": stream}
    extra = {name: given for name, given in offered.items() if name in wanted and name not in task.kwargs}
    value = method(*task.args, **task.kwargs, **extra)
    if not isinstance(value, Generator):
        return value
    while True:
        try:
            stream(next(value))
        except StopIteration as ending:
            return ending.value


def _serialized(task: Result, inputs: Any, clock: Clock) -> Result:
    task.inputs = inputs if task.keep_inputs else ((), {})
    try:
        task.time.serialize_results = task.serialize(clock)
    except GradientMailError as error:
        task.set_failure(FailureInformation.from_exception(error))
        task.serialize(clock)
    return task


def _has_signature(method: Method) -> bool:
    try:
        inspect.signature(method)
    except (TypeError, ValueError):  # some functions written in C
        return False
    return True
