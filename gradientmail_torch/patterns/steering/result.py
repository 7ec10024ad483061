"""One task, from request to result: what was asked, what came out, and when each step of the way was taken.

The form is Colmena's (0.7), field for field, so that its Thinkers and task servers can read ours.
"""

from __future__ import annotations

import copy
import json
import math
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.messages import DataRef, writable
from gradientmail_torch.patterns.steering.overhead import Overhead, overhead
from gradientmail_torch.patterns.steering.serialization import Method, Payload, decode, encode

MARKS = (
    "created",
    "input_received",
    "start_task_submission",
    "compute_started",
    "compute_ended",
    "task_received",
    "result_sent",
    "result_received",
)
"""The steps in the life of a task, in order."""


@dataclass(slots=True, kw_only=True)
class Timestamps:
    """When each step was taken: seconds since 1970 by the clock of the machine that took it, None before."""

    created: float = field(default_factory=SYSTEM_CLOCK.wall)
    """The Thinker wrote the request."""
    input_received: float | None = None
    """A task server has it."""
    start_task_submission: float | None = None
    """The server hands it to its engine."""
    compute_started: float | None = None
    """A worker begins: it reads the inputs first."""
    compute_ended: float | None = None
    """The worker's function has returned; the result is not written yet."""
    task_received: float | None = None
    """The server has it back from the engine."""
    result_sent: float | None = None
    """The server sends it."""
    result_received: float | None = None
    """The Thinker has it, its value read."""


@dataclass(slots=True, kw_only=True)
class TimeSpans:
    """How long parts of it took, in seconds."""

    running: float | None = None
    """The function itself."""
    serialize_inputs: float | None = None
    deserialize_inputs: float | None = None
    serialize_results: float | None = None
    deserialize_results: float | None = None
    additional: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FailureInformation:
    exception: str
    traceback: str | None = None

    @classmethod
    def from_exception(cls, error: BaseException) -> FailureInformation:
        try:
            text = repr(error)
        except Exception:  # the error is foreign code
            text = f"{type(error).__name__}, which cannot say what it is"
        return cls(exception=writable(text), traceback=writable("".join(traceback.format_exception(error))))


@dataclass(slots=True, kw_only=True)
class WorkerInformation:
    """Where the task ran."""

    hostname: str | None = None
    pid: int | None = None
    server: str | None = None
    """The task server: its learner ID, where it has one."""
    attempt: int | None = None
    """How many nodes this task has been given to, this one included: the fencing token for what it writes elsewhere."""
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ResourceRequirements:
    """What a task asks of a cluster; passed to the function that has a parameter ``_resources``."""

    node_count: int = 1
    cpu_processes: int = 1
    cpu_threads: int = 1
    walltime_s: float | None = None
    """Seconds after which the task is killed and counts as failed."""

    @property
    def total_ranks(self) -> int:
        return self.node_count * self.cpu_processes


@dataclass(slots=True)
class Result:
    """A task's request and, later, its result. The same object travels the whole way.

    Between :meth:`serialize` and :meth:`deserialize`, ``inputs`` and ``value`` hold payloads, or references to some.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments."""
    value: Any = None
    method: str | None = None
    task_id: str = field(default_factory=lambda: str(uuid4()))
    success: bool | None = None
    """None until it has run."""
    complete: bool | None = None
    """False for an intermediate result, after which more will come."""
    task_info: dict[str, Any] | None = field(default_factory=dict)
    """Whatever the Thinker wants to have back with the result."""
    resources: ResourceRequirements = field(default_factory=ResourceRequirements)
    failure_info: FailureInformation | None = None
    worker_info: WorkerInformation | None = None
    message_sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the serialized ``inputs`` and ``value``."""
    timestamp: Timestamps = field(default_factory=Timestamps)
    time: TimeSpans = field(default_factory=TimeSpans)
    serialization_method: Method = "json"
    keep_inputs: bool = True
    topic: str | None = None
    max_retries: int = 0
    """How often the function may fail and be run again."""
    retries: int = 0

    @classmethod
    def from_args_and_kwargs(cls, fn_args: Sequence[Any], fn_kwargs: Mapping[str, Any] | None = None, **fields: Any) -> Result:
        return cls((tuple(fn_args), dict(fn_kwargs or {})), **fields)

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(self.inputs[0])

    @property
    def kwargs(self) -> dict[str, Any]:
        return self.inputs[1]

    # --- marks ----------------------------------------------------------------------------------------

    def mark(self, step: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """Record that ``step``, one of :data:`MARKS`, is taken now."""
        if step not in MARKS:
            raise ConfigError(f"unknown mark {step!r}: it is one of {', '.join(MARKS)}")
        setattr(self.timestamp, step, clock.wall())

    def mark_input_received(self) -> None:
        self.mark("input_received")

    def mark_start_task_submission(self) -> None:
        self.mark("start_task_submission")

    def mark_compute_started(self) -> None:
        self.mark("compute_started")

    def mark_compute_ended(self) -> None:
        self.mark("compute_ended")

    def mark_task_received(self) -> None:
        self.mark("task_received")

    def mark_result_sent(self) -> None:
        self.mark("result_sent")

    def mark_result_received(self) -> None:
        self.mark("result_received")

    def overhead(self) -> Overhead:
        """Where the time between request and result went; the clocks of the machines need not agree."""
        return overhead(self.timestamp, self.time)

    # --- outcome --------------------------------------------------------------------------------------

    def set_result(self, value: Any, runtime: float | None = None, intermediate: bool = False) -> None:
        """Set the value; drops the inputs where ``keep_inputs`` is False. ``runtime`` in seconds."""
        self.value = value
        if not self.keep_inputs:
            self.inputs = ((), {})
        self.time.running = runtime
        self.success = True
        self.complete = not intermediate

    def set_failure(self, failure: FailureInformation) -> None:
        self.value = None
        if not self.keep_inputs:
            self.inputs = ((), {})
        self.failure_info = failure
        self.success = False
        self.complete = True

    def copy(self) -> Result:
        """A copy with records of its own; inputs and value are shared."""
        twin = copy.copy(self)
        twin.timestamp, twin.time = copy.copy(self.timestamp), copy.deepcopy(self.time)
        twin.worker_info, twin.message_sizes = copy.copy(self.worker_info), dict(self.message_sizes)
        return twin

    # --- serialization --------------------------------------------------------------------------------

    def serialize(self, clock: Clock = SYSTEM_CLOCK) -> float:
        """Turn inputs and value into payloads. Returns the seconds it took. On an error nothing has changed."""
        began = clock.monotonic()
        args = tuple(self._encoded(value, f"argument {place}") for place, value in enumerate(self.inputs[0]))
        kwargs = {name: self._encoded(value, f"argument {name!r}") for name, value in self.inputs[1].items()}
        value = None if self.value is None else self._encoded(self.value, "the result")
        sizes = [len(payload.data) for payload in (*args, *kwargs.values()) if isinstance(payload, Payload)]
        self.message_sizes.setdefault("inputs", sum(sizes))
        if isinstance(value, Payload):
            self.message_sizes["value"] = len(value.data)
        self.inputs, self.value = (args, kwargs), value
        return clock.monotonic() - began

    def deserialize(self, clock: Clock = SYSTEM_CLOCK) -> float:
        """Turn payloads into values. Returns the seconds it took. Raises ``CorruptObject``; then nothing has changed."""
        began = clock.monotonic()
        args = tuple(self._decoded(value) for value in self.inputs[0])
        kwargs = {name: self._decoded(value) for name, value in self.inputs[1].items()}
        self.value = self._decoded(self.value)
        self.inputs = (args, kwargs)
        return clock.monotonic() - began

    def _encoded(self, value: Any, what: str) -> Any:
        return value if isinstance(value, (Payload, DataRef)) else encode(value, self.serialization_method, what=what)

    @staticmethod
    def _decoded(value: Any) -> Any:
        return decode(value) if isinstance(value, Payload) else value

    # --- JSON -----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Colmena's form: what is not set is left out. Inputs and value are as they are."""
        found = {name: getattr(self, name) for name in self.__slots__ if name not in _NESTED}
        found |= {name: _set(asdict(nested)) for name in _NESTED if (nested := getattr(self, name)) is not None}
        return _set(found)

    def json(self, exclude: Collection[str] = (), **_: Any) -> str:
        """Strict JSON, without the fields in ``exclude``. Numbers that JSON lacks (NaN, infinity) are written as null."""
        content = {name: value for name, value in self.to_dict().items() if name not in exclude}
        return json.dumps(_finite(content), allow_nan=False)


_NESTED = ("resources", "failure_info", "worker_info", "timestamp", "time")


def _set(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Payload():
            return value.text()
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
