"""What all task servers have in common: they take tasks from a queue while they have room, until they are told to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import ConfigError, KillSignal, MailboxUnavailable
from gradientmail_torch.patterns.steering.methods import Method, by_name
from gradientmail_torch.patterns.steering.queues.base import ServerInfo, TaskQueues
from gradientmail_torch.patterns.steering.result import Result
from gradientmail_torch.patterns.steering.servers.child import context

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

log = logging.getLogger(__name__)

_TAKE_S = 0.25
_REACTION_S = 0.5


class TaskServer(ABC):
    """Runs the tasks of a queue: :meth:`run` in this process, or :meth:`start` in one of its own.

    Args:
        methods: functions that tasks may ask for, by their names.
        queues: where the tasks come from.
        slots: tasks that it takes at a time.
        timeout: seconds without a task after which it ends by itself. None: never.
        start_method: how processes are made: ``spawn``, ``forkserver`` or ``fork``. The first two need functions that
            can be imported, and a main script guarded by ``if __name__ == "__main__"``.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        queues: TaskQueues,
        *,
        slots: int = 1,
        timeout: float | None = None,
        start_method: str = "spawn",
        name: str | None = None,
    ) -> None:
        if slots < 1:
            raise ConfigError(f"slots must be at least 1, not {slots!r}")
        if not isinstance(queues, TaskQueues):
            raise ConfigError(f"queues must be PipeQueues, RedisQueues or MailboxQueues, not {queues!r}: the order is (methods, queues, …)")
        context(start_method)
        self.methods = by_name(methods)
        self.queues = queues
        self.slots = slots
        self.timeout = timeout
        self.start_method = start_method
        self.name = name or f"{type(self).__name__}-{platform.node()}-{uuid4().hex[:8]}"
        self._process: BaseProcess | None = None
        self._reset()

    def _reset(self) -> None:
        self._stop = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_stop", "_process")} | {"_process": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # --- in a process of its own ----------------------------------------------------------------------

    def start(self) -> None:
        """:meth:`run` in a new process."""
        if self._process is not None:
            raise ConfigError(f"{self.name} has been started before: make a new one")
        process = context(self.start_method).Process(target=self.run, name=self.name)
        try:
            process.start()
        except (AttributeError, TypeError, ImportError) as error:
            raise ConfigError(
                f"{self.name} cannot be given to a new process ({error}). Define methods at the top level of a module, give a "
                "mailbox as its URL, and a Parsl configuration as a function that makes it; or use start_method='fork', or run()"
            ) from error
        self._process = process
        self.queues.open()  # not before: a fork should find no threads

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode if self._process is not None else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def join(self, timeout: float | None = None) -> None:
        if self._process is not None:
            self._process.join(timeout)

    def terminate(self) -> None:
        """The notice that a cloud gives: tasks are given back at once."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    # --- in this process ------------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave now: give back what runs, for other servers to take at once, and return from :meth:`run`."""
        self._stop.set()

    def run(self) -> None:
        """Run tasks until the queue's kill signal, then finish what runs. SIGTERM does what :meth:`stop` does."""
        self._stop.clear()
        info = ServerInfo(server_id=self.name, slots=self.slots, methods=tuple(self.methods), host=platform.node())
        with contextlib.ExitStack() as stack:
            self._warm_up()
            queues = self.queues.for_server(info)
            stack.callback(queues.close)
            stack.enter_context(self._obeying_sigterm())
            engine = self._engine(queues, queues.clock)
            stack.callback(engine.close)
            try:
                self._serve(queues, engine)
                while not self._stop.is_set() and not engine.await_idle(_REACTION_S):
                    queues.tend()
            finally:  # on the kill signal everything has ended by now
                engine.leave()

    def _warm_up(self) -> None:  # noqa: B027  # most are ready at once
        """What takes long, and is done before the Thinker is told that this server is here."""

    @abstractmethod
    def _engine(self, queues: TaskQueues, clock: Clock) -> Engine: ...

    def _serve(self, queues: TaskQueues, engine: Engine) -> None:
        idle_since = answered = queues.clock.monotonic()
        while not self._stop.is_set():
            if not engine.await_room(_REACTION_S):
                idle_since = queues.clock.monotonic()
                queues.tend()
                continue
            try:
                task = queues.get_task(timeout=_TAKE_S)[1]
                idle_since = answered = queues.clock.monotonic()
                engine.give(task)
            except TimeoutError:
                answered = queues.clock.monotonic()
                if self.timeout is not None and answered - idle_since >= self.timeout:
                    log.info("%s ends: no task for %g s", self.name, self.timeout)
                    return
            except KillSignal as reason:
                log.info("%s ends: %s", self.name, reason)
                return
            except MailboxUnavailable as error:
                if queues.clock.monotonic() - answered > self.outage_timeout_s:
                    raise
                log.warning("%s: the queue does not answer, waiting for it: %s", self.name, error)
                queues.clock.sleep(_REACTION_S)

    outage_timeout_s = 600.0

    @contextlib.contextmanager
    def _obeying_sigterm(self) -> Iterator[None]:
        """Only a main thread may do so; elsewhere the program is in charge."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        owner = os.getpid()

        def leave(_number: int, _frame: FrameType | None) -> None:
            if os.getpid() == owner:
                self.stop()

        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


class Engine(ABC):
    """What a server has its tasks run by."""

    @abstractmethod
    def await_room(self, wait_s: float) -> bool:
        """Whether one more task can be taken, after at most about ``wait_s`` seconds. Raises what has broken the engine."""

    @abstractmethod
    def give(self, task: Result) -> None: ...

    @abstractmethod
    def await_idle(self, wait_s: float) -> bool:
        """Whether nothing runs, after at most about ``wait_s`` seconds."""

    @abstractmethod
    def leave(self) -> None:
        """Give back what runs, and take nothing more."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what runs, and end threads and processes."""
