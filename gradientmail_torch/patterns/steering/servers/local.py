"""A task server for one machine: a pool of processes, or threads."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from gradientmail_torch.clock import Clock
from gradientmail_torch.patterns.steering.methods import Method
from gradientmail_torch.patterns.steering.queues.base import TaskQueues
from gradientmail_torch.patterns.steering.result import Result
from gradientmail_torch.patterns.steering.servers.base import Engine, TaskServer
from gradientmail_torch.patterns.steering.servers.child import Child, preload
from gradientmail_torch.patterns.steering.servers.engine import Settings, Slot


class SlotTaskServer(TaskServer):
    """A server whose engine is a number of slots."""

    _settings: Settings

    def _warm_up(self) -> None:
        """A fork server takes as long to start as importing what the methods need: tasks should not wait for that."""
        if self._settings.isolation == "process" and self.start_method == "forkserver":
            preload(self.methods)
            Child(self.methods, start_method=self.start_method).close()

    def _engine(self, queues: TaskQueues, clock: Clock) -> Engine:
        return SlotEngine(self.slots, self.methods, queues, self._settings, server=self.name, clock=clock)


class LocalTaskServer(SlotTaskServer):
    """Runs tasks in ``num_workers`` processes of this machine, which it keeps; one that crashes is replaced.

    With ``threads=True`` they run in threads of the server: quicker to begin, but they share one interpreter and
    cannot be killed.
    """

    def __init__(
        self,
        methods: Iterable[Method],
        queues: TaskQueues,
        *,
        num_workers: int = 1,
        threads: bool = False,
        walltime_s: float | None = None,
        timeout: float | None = None,
        start_method: str = "spawn",
    ) -> None:
        super().__init__(methods, queues, slots=num_workers, timeout=timeout, start_method=start_method)
        self._settings = Settings(
            isolation="thread" if threads else "process",
            fresh=False,
            start_method=start_method,
            walltime_s=walltime_s,
            watch_interval_s=0.5,
            outage_timeout_s=self.outage_timeout_s,
        )


class SlotEngine(Engine):
    def __init__(
        self, count: int, methods: Mapping[str, Method], queues: TaskQueues, settings: Settings, *, server: str, clock: Clock
    ) -> None:
        self._clock = clock
        self._freed = threading.Event()
        self._slots: list[Slot] = []
        try:
            for number in range(count):
                self._slots.append(Slot(number, methods, queues, settings, server=server, freed=self._freed, clock=clock))
        except BaseException:
            self.close()
            raise

    def await_room(self, wait_s: float) -> bool:
        self._freed.clear()
        for slot in self._slots:
            if slot.failure is not None:
                raise slot.failure
        return any(not slot.busy for slot in self._slots) or self._clock.wait(self._freed, wait_s)

    def give(self, task: Result) -> None:
        next(slot for slot in self._slots if not slot.busy).give(task)

    def await_idle(self, wait_s: float) -> bool:
        self._freed.clear()
        if any(slot.busy for slot in self._slots):
            self._clock.wait(self._freed, wait_s)
        return not any(slot.busy for slot in self._slots)

    def leave(self) -> None:
        for slot in self._slots:
            slot.leave()

    def close(self) -> None:
        for slot in self._slots:
            slot.close()
