"""The Thinker: agents that decide which computations to run and learn from their results."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from functools import partial

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock, Task
from gradientmail_torch.errors import ConfigError, ThinkerFailed
from gradientmail_torch.patterns.steering.agents import AgentSpec, Function, Responders, run_agent, spec_of
from gradientmail_torch.patterns.steering.queues.base import TaskQueues
from gradientmail_torch.patterns.steering.resources import ResourceCounter


class _AgentData(threading.local):
    """What each agent's thread has of its own."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self.name: str | None = None


class BaseThinker:
    """Subclass it, mark methods as agents, and call :meth:`run`, or :meth:`start` and :meth:`join`.

    Each agent runs in a thread of its own. When an agent that is no ``startup`` agent returns, ``done`` is set and
    the others come to an end: submitters at once, processors when all results have come. When an agent raises,
    all of them are let go, and :meth:`run` (or :meth:`join`) raises what it raised.

    Args:
        queue: to the task servers.
        resource_counter: what ``task_submitter`` agents take their slots from, as ``self.rec``.
        logger_name: name of ``self.logger``'s parent.
    """

    def __init__(
        self,
        queue: TaskQueues,
        resource_counter: ResourceCounter | None = None,
        daemon: bool = True,  # as in Colmena; threads here always are
        logger_name: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.queues = queue
        self.queues.set_role("client")
        self.clock: Clock = getattr(queue, "clock", SYSTEM_CLOCK)
        self.name = name or type(self).__name__
        self.logger_name = logger_name
        self._counter = resource_counter
        self.done = threading.Event()
        """Set when the agents shall come to an end; any agent may set it."""
        self.submitters_done = threading.Event()
        """Set when no ``task_submitter`` runs any more."""
        self.responders: dict[str, Responders] = {}
        self.local_details = _AgentData(self.make_logger())
        self._failure: BaseException | None = None
        self._task: Task | None = None

    @property
    def rec(self) -> ResourceCounter:
        """The counter of resources."""
        if self._counter is None:
            raise ConfigError(f"{type(self).__name__} has a task_submitter and no resource counter: pass a ResourceCounter")
        return self._counter

    @property
    def failed(self) -> bool:
        """Whether an agent has raised."""
        return self._failure is not None

    @property
    def logger(self) -> logging.Logger:
        """The logger of the agent that asks."""
        return self.local_details.logger

    @property
    def agent_name(self) -> str | None:
        return self.local_details.name

    def prepare_agent(self) -> None:
        """Override: called in each agent's thread before it begins."""

    def tear_down_agent(self) -> None:
        """Override: called in each agent's thread after it has ended."""

    def make_logger(self, name: str | None = None) -> logging.Logger:
        base = self.logger_name or f"{type(self).__module__}.{type(self).__name__}"
        return logging.getLogger(f"{base}.{name}" if name else base)

    @classmethod
    def list_agents(cls) -> list[Function]:
        """The functions that are marked as agents."""
        found = (getattr(cls, name) for name in dir(cls))
        return [function for function in found if spec_of(function) is not None]

    # --- running --------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all agents and wait for their end. Raises what an agent has raised."""
        agents = [(function, spec) for function in self.list_agents() if (spec := spec_of(function)) is not None]
        if not agents:
            raise ConfigError(f"{type(self).__name__} has no agents: mark methods with @agent, @result_processor, @task_submitter, …")
        self.queues.abandon(None)
        per_event = Counter(spec.event_name for _, spec in agents if spec.kind == "event_responder")
        self.responders = {name: Responders(count) for name, count in per_event.items()}
        self._submitters = sum(spec.kind == "task_submitter" for _, spec in agents)
        self._lock = threading.Lock()
        if not self._submitters:
            self.submitters_done.set()
        tasks = [self.clock.spawn(partial(self._launch, *one), name=f"{self.name} {one[0].__name__}") for one in agents]
        for task in tasks:
            task.join()
        if self._failure is not None:
            raise self._failure

    def start(self) -> None:
        """:meth:`run` in a thread."""
        if self._task is not None:
            raise ConfigError(f"{type(self).__name__} has been started before: make a new one")
        self._task = self.clock.spawn(self._run_quietly, name=self.name)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end after :meth:`start`, at most ``timeout`` seconds; True when it has come. Raises what an agent has raised."""
        if self._task is None:
            raise ConfigError(f"{type(self).__name__} has not been started")
        ended = self._task.join(timeout)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.join(0)

    def _run_quietly(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._failure = error  # join raises it

    def _launch(self, function: Function, spec: AgentSpec) -> None:
        """The life of one agent, in its thread."""
        name = getattr(function, "__name__", "agent")
        self.local_details.name, self.local_details.logger = name, self.make_logger(name)
        try:
            self.prepare_agent()
            try:
                run_agent(self, function, spec)
            finally:
                self.tear_down_agent()
        except ThinkerFailed:
            pass  # it was let go
        except BaseException as error:
            self.logger.error("agent %s has failed, so the others are let go", name, exc_info=error)
            self._fail(error)
        if self.failed or not spec.startup:
            self.done.set()
        if spec.kind == "task_submitter":
            with self._lock:
                self._submitters -= 1
                if not self._submitters:
                    self.submitters_done.set()

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
        self.queues.abandon(error)
