"""Many machines, one store and a bad network in one process, replayed from a seed.

::

    with SimulatedCluster(seed, conditions=Conditions.from_rng(random.Random(seed))) as cluster:
        def node(name):
            box = cluster.retrying()
            Barrier(box, name, clock=cluster.clock).wait("start", parties=3)
        nodes = [cluster.process(name, lambda name=name: node(name)) for name in "abc"]
        cluster.at(2.0, lambda: cluster.pause(nodes[0], 60.0))
        cluster.observe(check_invariants)
        cluster.run(limit_s=3600)

The code under test runs in real threads, one at a time, and must wait only by its Clock and reach others only by
its Mailbox; it must not hold a lock over either. An :class:`threading.Event` belongs to one simulated process.
What it draws from the operating system (``os.urandom``, ``uuid4``, ``secrets``) comes from the seed meanwhile;
a :class:`random.Random` must be handed in. Then one seed gives one log, event by event.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from gradientmail_torch.clock import Clock, Task
from gradientmail_torch.mailbox.base import Mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.mailbox.wrappers import RetryingMailbox
from gradientmail_torch.testing.faults import Crash
from gradientmail_torch.testing.kernel import Kernel
from gradientmail_torch.testing.network import Conditions, Event, SimulatedMailbox
from gradientmail_torch.testing.process import Process, SimulatedThread, SimulationError

__all__ = ["Conditions", "Event", "Process", "SimulatedCluster", "SimulationError"]

_BEGAN = 1_700_000_000.0  # seconds since 1970


class SimulatedClock:
    """The clock of whichever simulated process asks. Each has its own hour and its own origin."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def monotonic(self) -> float:
        thread = self._kernel.inside()
        return self._kernel.now_s + (thread.process.monotonic_origin_s if thread else 0.0)

    def wall(self) -> float:
        thread = self._kernel.inside()
        return _BEGAN + self._kernel.now_s + (thread.process.wall_offset_s if thread else 0.0)

    def sleep(self, seconds: float) -> None:
        self._kernel.sleep(seconds)

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        return self._kernel.wait(event, timeout)

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        thread = self._kernel.inside()
        if thread is None:
            raise SimulationError(f"cannot spawn {name!r} outside of a simulated process: start one with cluster.process")
        return self._kernel.spawn(thread.process, target, name)


class SimulatedCluster:
    """Processes on a virtual time line. Use as a context manager, which ends all of them.

    Args:
        seed: decides everything that is not the program's.
        conditions: of network and machines; by default nothing is lost.
        log_events: how many of the newest events :attr:`log` keeps; all by default.
        kernel: what runs the threads of the processes.
    """

    def __init__(
        self,
        seed: int,
        *,
        conditions: Conditions | None = None,
        log_events: int | None = None,
        kernel: Callable[..., Kernel] = Kernel,
    ) -> None:
        self.seed = seed
        self.conditions = conditions or Conditions()
        self.store = MemoryMailbox(f"simulated-{seed}")
        """What the mailbox holds, for looking at it and for setting it up."""
        self.log: deque[Event] = deque(maxlen=log_events)
        self.requests = 0
        """Requests that have taken effect."""
        self.processes: list[Process] = []
        self._observers: list[Callable[[Event], object]] = []
        self._kernel = kernel(
            self.rng("schedule"),
            jitter_s=self.conditions.jitter_s,
            hiccup_share=self.conditions.hiccup_share,
            hiccup_s=self.conditions.hiccup_s,
        )
        self._kernel.on_end = self._thread_ended
        self._mailbox = SimulatedMailbox(self._kernel, self.store, self.conditions, self._recorded)
        self.mailbox: Mailbox = self._mailbox
        """The mailbox as simulated processes see it, without retries."""
        self.clock: Clock = SimulatedClock(self._kernel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def now_s(self) -> float:
        """Virtual seconds since the beginning."""
        return self._kernel.now_s

    def rng(self, purpose: str) -> random.Random:
        """A source of random numbers of its own for each purpose, from the seed."""
        return random.Random(f"{self.seed} {purpose}")

    def retrying(self, **settings: float) -> RetryingMailbox:
        """The mailbox as :func:`open_mailbox` would give it to a process: with retries."""
        return RetryingMailbox(self.mailbox, clock=self.clock, rng=self.rng(f"retries {len(self.processes)}"), **settings)

    # --- processes ------------------------------------------------------------------------------------

    def process(self, name: str, function: Callable[[], object], *, delay_s: float = 0.0, up_bytes_per_s: float = float("inf")) -> Process:
        """Start a process that runs ``function``, in ``delay_s`` seconds; the process ends when it returns.

        A second process of the same name is a restart: it shares nothing with the first but the mailbox.
        """
        rng = self.rng(f"process {len(self.processes)}")
        process = Process(
            name=name,
            number=len(self.processes),
            wall_offset_s=rng.uniform(-12, 12) * 3600,
            monotonic_origin_s=rng.uniform(0, 1e6),
            up_bytes_per_s=up_bytes_per_s,
            entropy=random.Random(rng.random()),
        )

        def main() -> None:
            self._happened(process, "start")
            try:
                process.value = function()
            except Crash:
                raise
            except BaseException as error:
                process.error = error
                self._kernel.fail(error)

        self.processes.append(process)
        self._kernel.spawn(process, main, "main", delay_s)
        return process

    def kill(self, process: Process) -> None:
        """End ``process`` as SIGKILL does. What it had sent wholly may still be carried out, all else is not."""
        if process.alive:
            self._happened(process, "kill")
            self._kernel.kill(process)

    def pause(self, process: Process, seconds: float, *, clock_stops: bool = False) -> None:
        """Suspend ``process`` from now on. With ``clock_stops`` its monotonic clock stands still, as a suspended VM's."""
        self._happened(process, "pause", f"{seconds:g} s")
        self._kernel.pause(process, seconds, clock_stops=clock_stops)

    def outage(self, seconds: float, process: Process | None = None) -> None:
        """The store cannot be reached from now on, by anyone or by one process."""
        self._happened(process, "outage", f"{seconds:g} s")
        self._mailbox.outage(seconds, process)

    # --- running --------------------------------------------------------------------------------------

    def at(self, in_s: float, action: Callable[[], object]) -> None:
        """Do ``action`` in so many seconds: kill, pause, start a process. The simulation does not end before."""
        self._kernel.plan(in_s, action)

    def observe(self, observer: Callable[[Event], object]) -> None:
        """Call ``observer`` after each request that took effect. What it raises ends the simulation."""
        self._observers.append(observer)

    def run(self, *, limit_s: float = 24 * 3600.0) -> None:
        """Run until every process has ended, or one of them raises; raises that.

        Raises :class:`SimulationError` when nothing can run any more, or ``limit_s`` virtual seconds have passed.
        """
        limit_at_s = self.now_s + limit_s
        try:
            if not self._drive(limit_at_s):
                raise SimulationError(f"not at its end after {limit_s:g} simulated seconds\n{self._kernel.waiting()}")
        except BaseException as error:
            error.add_note(f"seed {self.seed}, {self.requests} requests, the end of the log:\n{self.trace(40)}")
            self.close()
            raise

    def advance(self, seconds: float) -> bool:
        """Run for so many virtual seconds. True when every process has ended."""
        return self._drive(self.now_s + seconds)

    def trace(self, events: int | None = None) -> str:
        """The log, or its newest ``events``, a line each."""
        return "\n".join(str(event) for event in (self.log if events is None else [*self.log][-events:]))

    def close(self) -> None:
        """End every process."""
        with self._seeded_entropy():
            self._kernel.close()

    def _drive(self, until_s: float) -> bool:
        with self._seeded_entropy():
            return self._kernel.drive(until_s)

    def _thread_ended(self, thread: SimulatedThread) -> None:
        process = thread.process
        if process.alive and (thread is process.main or thread.crashed):
            process.left_running = [other.name for other in process.threads]
            error = process.error
            self._happened(process, "crash" if thread.crashed else "end", f"{type(error).__name__}: {error}" if error else "")
            self._kernel.kill(process)

    def _happened(self, process: Process | None, what: str, outcome: str = "") -> None:
        thread = self._kernel.inside()
        where = thread.name if thread else ""
        self._recorded(Event(at_s=self.now_s, process=str(process or "all"), thread=where, what=what, outcome=outcome), False)

    def _recorded(self, event: Event, effect: bool) -> None:
        self.log.append(event)
        if effect:
            self.requests += 1
            for observer in self._observers:
                observer(event)

    @contextmanager
    def _seeded_entropy(self) -> Iterator[None]:
        """Give simulated threads random bytes of their process's own seed instead of the operating system's."""
        system = os.urandom

        def urandom(size: int) -> bytes:
            thread = self._kernel.inside()
            return thread.process.entropy.randbytes(size) if thread else system(size)

        os.urandom = random._urandom = urandom  # type: ignore[attr-defined]  # what uuid and secrets call
        try:
            yield
        finally:
            os.urandom = random._urandom = system  # type: ignore[attr-defined]
