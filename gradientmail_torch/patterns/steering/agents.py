"""Agents: the functions of a Thinker, each run by a thread of its own. What their decorators say, and how each kind loops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from gradientmail_torch.errors import ConfigError, ThinkerFailed
from gradientmail_torch.patterns.steering.resources import reallocate_until

if TYPE_CHECKING:
    from gradientmail_torch.patterns.steering.thinker import BaseThinker

Function = Callable[[Any], object]
Responder = Callable[[Any, Any], object]
F = TypeVar("F", bound=Callable[..., object])

_REACTION_S = 0.5
_MARK = "__steering_agent__"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """What a decorator says about a function."""

    kind: Literal["agent", "result_processor", "task_submitter", "event_responder"] = "agent"
    startup: bool = False
    topic: str = "default"
    task_type: str | None = None
    n_slots: int | str = 1
    event_name: str = ""
    reallocate_resources: bool = False
    gather_from: str | None = None
    gather_to: str | None = None
    disperse_to: str | None = None
    max_slots: int | str | None = None
    slot_step: int = 1


def spec_of(function: object) -> AgentSpec | None:
    found = getattr(function, _MARK, None)
    return found if isinstance(found, AgentSpec) else None


def _marked(spec: AgentSpec) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, spec)
        return function

    return mark


@overload
def agent(func: F) -> F: ...
@overload
def agent(func: None = None, startup: bool = False) -> Callable[[F], F]: ...
def agent(func: F | None = None, startup: bool = False) -> F | Callable[[F], F]:
    """A function that runs once, from the Thinker's start. When it returns, the Thinker is done.

    With ``startup=True`` it may return without ending the others; when it raises, it ends them all the same.
    """
    mark = _marked(AgentSpec(startup=startup))
    return mark if func is None else mark(func)


@overload
def result_processor(func: F) -> F: ...
@overload
def result_processor(func: None = None, topic: str = "default") -> Callable[[F], F]: ...
def result_processor(func: F | None = None, topic: str = "default") -> F | Callable[[F], F]:
    """A function that is called with each :class:`Result` of ``topic``, until the Thinker is done and all have come."""
    mark = _marked(AgentSpec(kind="result_processor", topic=topic))
    return mark if func is None else mark(func)


@overload
def task_submitter(func: F) -> F: ...
@overload
def task_submitter(func: None = None, task_type: str | None = None, n_slots: int | str = 1) -> Callable[[F], F]: ...
def task_submitter(func: F | None = None, task_type: str | None = None, n_slots: int | str = 1) -> F | Callable[[F], F]:
    """A function that is called whenever ``n_slots`` (a number, or the name of an attribute) of ``task_type`` are free.

    They are taken when it is called; whoever gets the result gives them back with ``self.rec.release``.
    """
    mark = _marked(AgentSpec(kind="task_submitter", task_type=task_type, n_slots=n_slots))
    return mark if func is None else mark(func)


def event_responder(
    func: object = None,
    event_name: str = "",
    reallocate_resources: bool = False,
    gather_from: str | None = None,
    gather_to: str | None = None,
    disperse_to: str | None = None,
    max_slots: int | str | None = None,
    slot_step: int = 1,
) -> Callable[[F], F]:
    """A function that is called when the Thinker's attribute ``event_name``, a ``threading.Event``, is set.

    The event is cleared when all functions that answer to it have returned. With ``reallocate_resources``, slots
    are moved from the pool ``gather_from`` to ``gather_to`` while it runs, ``slot_step`` at a time and up to
    ``max_slots`` (a number, or the name of an attribute), and all of that pool to ``disperse_to`` afterwards.
    """
    if func is not None or not event_name:
        raise ConfigError("event_responder needs the name of its event: @event_responder(event_name='…')")
    if reallocate_resources and gather_from == gather_to:
        raise ConfigError(f"event_responder: gather_from and gather_to are both {gather_to!r}; slots must move between two pools")
    return _marked(
        AgentSpec(
            kind="event_responder",
            event_name=event_name,
            reallocate_resources=reallocate_resources,
            gather_from=gather_from,
            gather_to=gather_to,
            disperse_to=disperse_to,
            max_slots=max_slots,
            slot_step=slot_step,
        )
    )


# --- how each kind runs -----------------------------------------------------------------------------------


def run_agent(thinker: BaseThinker, function: Function, spec: AgentSpec) -> None:
    match spec.kind:
        case "agent":
            function(thinker)
        case "result_processor":
            _process_results(thinker, function, spec)  # type: ignore[arg-type]
        case "task_submitter":
            _submit_tasks(thinker, function, spec)
        case "event_responder":
            _respond(thinker, function, spec)


def _process_results(thinker: BaseThinker, function: Responder, spec: AgentSpec) -> None:
    queues = thinker.queues
    while not thinker.failed and (queues.active_count or not (thinker.done.is_set() and thinker.submitters_done.is_set())):
        try:
            result = queues.get_result(topic=spec.topic, timeout=max(_REACTION_S, getattr(queues, "poll_interval", 0.0)))
        except TimeoutError:
            continue
        except ThinkerFailed:
            return
        function(thinker, result)
        queues.ack(result)


def _submit_tasks(thinker: BaseThinker, function: Function, spec: AgentSpec) -> None:
    n_slots = _number(thinker, spec.n_slots)
    while not thinker.done.is_set():
        if thinker.rec.acquire(spec.task_type, n_slots, cancel_if=thinker.done):
            function(thinker)


def _respond(thinker: BaseThinker, function: Function, spec: AgentSpec) -> None:
    event = getattr(thinker, spec.event_name, None)
    if not isinstance(event, threading.Event):
        raise ConfigError(f"{type(thinker).__name__} lacks the attribute {spec.event_name!r}: set it to a threading.Event in __init__")
    while not thinker.done.is_set():
        if not thinker.clock.wait(event, _REACTION_S):
            continue
        if spec.reallocate_resources:
            with reallocate_until(
                thinker.rec,
                gather_from=spec.gather_from,
                gather_to=spec.gather_to,
                disperse_to=spec.disperse_to,
                max_slots=None if spec.max_slots is None else _number(thinker, spec.max_slots),
                slot_step=spec.slot_step,
            ):
                function(thinker)
        else:
            function(thinker)
        thinker.responders[spec.event_name].finish(event, thinker)


class Responders:
    """The functions that answer to one event: the last of them to finish clears it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._finished = 0
        self._round = threading.Event()

    def finish(self, event: threading.Event, thinker: BaseThinker) -> None:
        """Wait until all have finished, or the Thinker has failed."""
        with self._lock:
            self._finished += 1
            this_round = self._round
            if self._finished == self._count:
                self._finished, self._round = 0, threading.Event()
                event.clear()
                this_round.set()
        while not thinker.clock.wait(this_round, _REACTION_S):
            if thinker.failed:
                return


def _number(thinker: BaseThinker, value: int | str) -> int:
    return value if isinstance(value, int) else int(getattr(thinker, value))
