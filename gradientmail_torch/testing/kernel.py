"""The scheduler under a simulated cluster: real threads of which exactly one runs, in an order that a seed decides.

A thread that has the baton runs until it blocks. Whoever blocks takes the next moment from the heap of what is to
come, does it if it is an action (a request taking effect, a planned fault) and hands the baton over if it is a
thread that wakes. Virtual time jumps from moment to moment, so hours pass in milliseconds.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable

from gradientmail_torch.testing.process import Killed, Process, SimulatedThread, SimulationError

STALL_S = 60.0
"""Real seconds that a thread may keep the baton: longer, and it waits for something outside of the simulation."""


class Kernel:
    """Virtual time and the baton. Not for code under test, which sees a Clock and a Mailbox only."""

    def __init__(self, rng: random.Random, *, jitter_s: float, hiccup_share: float, hiccup_s: float) -> None:
        self.rng = rng
        self.now_s = 0.0
        self.current: SimulatedThread | None = None
        self.threads: list[SimulatedThread] = []
        """Those that have not ended."""
        self.failure: BaseException | None = None
        self.on_end: Callable[[SimulatedThread], None] = lambda thread: None
        self._jitter_s, self._hiccup_share, self._hiccup_s = jitter_s, hiccup_share, hiccup_s
        self._heap: list[tuple[float, float, int, SimulatedThread | Callable[[], object], int]] = []
        self._numbers = itertools.count()
        self._planned = 0
        self._until_s = 0.0
        self._stopping = self._stalled = False
        self._ending: list[threading.Thread] = []
        self._handed = 0
        self._driver = threading.Lock()
        self._driver.acquire()

    # --- what a running thread does -------------------------------------------------------------------

    def inside(self) -> SimulatedThread | None:
        """The simulated thread that calls this; None for the test outside."""
        current = self.current
        return current if current is not None and current.real.ident == threading.get_ident() else None

    def sleep(self, seconds: float) -> None:
        thread = self._required("sleep")
        self.wake(thread, max(0.0, seconds) + self._delay_s())
        self.block(thread, "a sleep")

    def wait(self, event: threading.Event, timeout: float | None, *, what: str = "an event") -> bool:
        thread = self._required("wait")
        if event.is_set():
            self.wake(thread, self._delay_s())
        else:
            thread.event = event
            thread.process.waiters[thread.number] = thread
            if timeout is not None:
                self.wake(thread, max(0.0, timeout) + self._delay_s())
        self.block(thread, what)
        return event.is_set()

    def spawn(self, process: Process, target: Callable[[], None], name: str, delay_s: float = 0.0) -> SimulatedThread:
        """A new thread of ``process``. Passes the baton when a simulated thread calls it."""
        self.check_alive()
        thread = SimulatedThread(self, process, target, name, next(self._numbers))
        self.threads.append(thread)
        process.threads.append(thread)
        process.main = process.main or thread
        self.wake(thread, delay_s + self._delay_s())
        if caller := self.inside():
            self.wake(caller, self._delay_s())
            self.block(caller, "a spawn")
        return thread

    def check_alive(self) -> None:
        """Raises :class:`Killed` in a thread of a process that was killed: it has no effect any more."""
        thread = self.inside()
        if thread is not None and thread.killed:
            raise Killed(str(thread))

    def wake(self, thread: SimulatedThread, in_s: float) -> None:
        """Let ``thread``, which blocks now, go on in so many seconds."""
        heapq.heappush(self._heap, (self.now_s + in_s, self.rng.random(), next(self._numbers), thread, thread.turn))

    def block(self, thread: SimulatedThread, what: str) -> None:
        """Pass the baton on, and return when it comes back."""
        if thread.killed:
            thread.process.waiters.pop(thread.number, None)
            raise Killed(str(thread))
        thread.what = what
        following = self._next(thread.process)
        if following is not thread:
            self._hand(following)
            thread.gate.acquire()
        if thread.killed:
            raise Killed(str(thread))

    def leave(self, thread: SimulatedThread) -> None:
        """The end of a thread: it passes the baton on for the last time."""
        self.threads.remove(thread)
        thread.process.threads.remove(thread)
        self._ending = [real for real in self._ending if real.is_alive()] + [thread.real]
        try:
            self.on_end(thread)
        except BaseException as error:
            self.fail(error)
        self._hand(self._next(thread.process))

    # --- what is planned ------------------------------------------------------------------------------

    def act(self, in_s: float, action: Callable[[], object]) -> None:
        """Do ``action`` in so many seconds, whoever has the baton then."""
        heapq.heappush(self._heap, (self.now_s + in_s, self.rng.random(), next(self._numbers), action, -1))

    def plan(self, in_s: float, action: Callable[[], object]) -> None:
        """As :meth:`act`, for something that the simulation must not end before, and that may set events."""
        self._planned += 1

        def planned() -> None:
            self._planned -= 1
            action()
            self._poll_all()

        self.act(in_s, planned)

    def pause(self, process: Process, seconds: float, *, clock_stops: bool) -> None:
        """Wake none of the threads of ``process`` for a while; with ``clock_stops`` their timers stand still, too."""
        process.paused_at_s = self.now_s
        process.paused_until_s = max(process.paused_until_s, self.now_s + seconds)
        if clock_stops:
            process.monotonic_origin_s -= seconds
            self._heap = [
                (at_s + seconds * (isinstance(what, SimulatedThread) and what.process is process), tie, number, what, turn)
                for at_s, tie, number, what, turn in self._heap
            ]
            heapq.heapify(self._heap)

    def kill(self, process: Process) -> None:
        """Unwind all threads of ``process`` without further effect, the calling one too if it is one of them."""
        process.alive = False
        process.died_at_s = min(process.died_at_s, self.now_s)
        process.waiters.clear()
        for thread in process.threads:
            thread.killed = True
            thread.turn += 1
            if thread is not self.current:
                self.wake(thread, 0.0)
        self.check_alive()

    def fail(self, error: BaseException) -> None:
        """End the simulation with ``error``, the first one counts."""
        self.failure = self.failure or error

    # --- the driver -----------------------------------------------------------------------------------

    def drive(self, until_s: float) -> bool:
        """Run until the end (True) or until ``until_s`` (False). The caller's thread has no baton of its own."""
        self._until_s = until_s
        self._poll_all()
        try:
            self._hand(self._next(None))
            self._await_baton()
        except BaseException:
            self._stopping = True
            if not self._stalled:
                self._driver.acquire(timeout=STALL_S)
            raise
        if self.failure is not None:
            raise self.failure
        return self.ended()

    def ended(self) -> bool:
        """Whether no thread is left, and nothing planned that could start one."""
        return not self.threads and not self._planned

    def close(self) -> None:
        """Unwind every thread that is left."""
        self._stopping = True
        while self.threads and not self._stalled:
            thread = self.threads[-1]
            thread.killed = True
            if thread.started:
                self._hand(thread)
                self._await_baton()
            else:
                thread.finished.set()
                self.threads.remove(thread)
        for real in self._ending:
            real.join(STALL_S)
        self._ending.clear()

    def waiting(self) -> str:
        """What every thread waits for, a line each."""
        lines = []
        for thread in self.threads:
            until = min((at for at, _, _, what, turn in self._heap if what is thread and turn == thread.turn), default=None)
            lines.append(f"{thread} waits for {thread.what}" + (f" until {until:.3f} s" if until is not None else " without end"))
        return "\n".join(lines)

    def _await_baton(self) -> None:
        seen = -1
        while not self._driver.acquire(timeout=STALL_S):
            if seen == self._handed:
                thread = self.current
                frames = sys._current_frames().get(thread.real.ident or 0) if thread else None
                stack = "".join(traceback.format_stack(frames)) if frames else ""
                self._stalled = True  # it cannot be stopped, so nobody else may run
                raise SimulationError(f"{thread} has kept the baton for {STALL_S:g} s: it waits outside of the simulation\n{stack}")
            seen = self._handed

    # --- the baton ------------------------------------------------------------------------------------

    def _next(self, left: Process | None) -> SimulatedThread | None:
        """Who runs next; None for the driver. Does the actions that come before."""
        if left is not None:
            self._poll(left)
        while True:
            heap = self._heap
            if self._stopping or self.failure is not None:
                return None
            if self.ended():
                return None
            if not heap:
                self.fail(SimulationError(f"nothing can run any more at {self.now_s:.3f} s\n{self.waiting()}"))
                return None
            if heap[0][0] > self._until_s:
                self.now_s = max(self.now_s, self._until_s)
                return None
            at_s, _, _, what, turn = heapq.heappop(heap)
            if not isinstance(what, SimulatedThread):
                self.now_s = max(self.now_s, at_s)
                self.current = None
                try:
                    what()
                except BaseException as error:
                    self.fail(error)
            elif turn == what.turn and not what.finished.is_set():
                process = what.process
                if process.paused_until_s > at_s and not what.killed:
                    heapq.heappush(heap, (process.paused_until_s + self._delay_s(), self.rng.random(), next(self._numbers), what, turn))
                    continue
                self.now_s = max(self.now_s, at_s)
                if what.event is not None:
                    what.event = None
                    process.waiters.pop(what.number, None)
                what.turn += 1
                self.current = what
                return what

    def _hand(self, thread: SimulatedThread | None) -> None:
        self._handed += 1
        self.current = thread
        if thread is None:
            self._driver.release()
        elif thread.started:
            thread.gate.release()
        else:
            thread.started = True
            thread.real.start()

    def _poll(self, process: Process) -> None:
        """Wake the threads of ``process`` whose event has been set: events are set by threads of their own process."""
        for thread in [*process.waiters.values()]:
            if thread.event is not None and thread.event.is_set():
                del process.waiters[thread.number]
                thread.event = None
                thread.turn += 1
                self.wake(thread, self._delay_s())

    def _poll_all(self) -> None:
        for process in dict.fromkeys(thread.process for thread in self.threads):
            self._poll(process)

    def _delay_s(self) -> float:
        """How late a thread is woken: a little, and at times a good deal."""
        if self._hiccup_share and self.rng.random() < self._hiccup_share:
            return self.rng.random() * self._hiccup_s
        return self.rng.random() * self._jitter_s

    def _required(self, operation: str) -> SimulatedThread:
        thread = self.inside()
        if thread is None:
            raise SimulationError(f"cannot {operation} outside of a simulated process: start one with cluster.process")
        return thread
