"""A simulated process and its threads: what the kernel of a simulation schedules."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradientmail_torch.testing.faults import Crash

if TYPE_CHECKING:
    from gradientmail_torch.testing.kernel import Kernel


class Killed(Crash):
    """Unwinds a thread of a simulated process that has been killed."""


class SimulationError(AssertionError):
    """The simulation could not go on, or not end in time. The text says what every thread waits for."""


@dataclass(slots=True, kw_only=True, eq=False)
class Process:
    """A simulated process: threads that share memory, and live and die together."""

    name: str
    number: int
    wall_offset_s: float
    monotonic_origin_s: float
    up_bytes_per_s: float
    entropy: random.Random
    alive: bool = True
    died_at_s: float = float("inf")
    paused_at_s: float = 0.0
    paused_until_s: float = 0.0
    value: object = None
    """What its function returned."""
    error: BaseException | None = None
    """What its function raised."""
    left_running: list[str] = field(default_factory=list)
    """Names of threads that were running when its function returned. They die with the process, as daemons do."""
    main: SimulatedThread | None = None
    threads: list[SimulatedThread] = field(default_factory=list)
    waiters: dict[int, SimulatedThread] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}#{self.number}"


class SimulatedThread:
    """A thread that runs when it is given the baton. It is what :meth:`Clock.spawn` returns."""

    def __init__(self, kernel: Kernel, process: Process, target: Callable[[], None], name: str, number: int) -> None:
        self._kernel = kernel
        self.process = process
        self.target = target
        self.name = name
        self.number = number
        self.turn = 0  # a wake-up of an earlier turn is stale
        self.event: threading.Event | None = None
        self.what = "its start"
        self.killed = self.crashed = False
        self.started = False
        self.finished = threading.Event()
        self.gate = threading.Lock()
        self.gate.acquire()
        self.real = threading.Thread(target=self._run, name=f"simulated {self}", daemon=True)

    def __str__(self) -> str:
        return f"{self.process}/{self.name}"

    def join(self, timeout: float | None = None) -> bool:
        return self._kernel.wait(self.finished, timeout, what=f"the end of {self.name}")

    def _run(self) -> None:
        try:
            if not self.killed:
                self.target()
        except Crash:
            self.crashed = True
        except BaseException as error:
            self._kernel.fail(error)
        self.finished.set()
        self._kernel.leave(self)
