"""The tasks of one machine: who waits, who holds what, what has come back. All of it in the memory of one process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import KillSignal
from gradientmail_torch.patterns.steering.queues.base import ServerInfo
from gradientmail_torch.patterns.steering.result import FailureInformation
from gradientmail_torch.patterns.steering.wire import pack, unpack

T = TypeVar("T")


@dataclass(slots=True)
class Order:
    """A task as it waits or is held."""

    task_id: str
    topic: str
    message: bytes
    attempt: int = 1


class Desk:
    """Hands each task to one server at a time, takes one result for each. Safe to use from many threads.

    A server that leaves, or dies, has its tasks handed out again, ``max_attempts`` times in all.
    """

    def __init__(self, *, clock: Clock, max_attempts: int) -> None:
        self._clock = clock
        self._max_attempts = max_attempts
        self._lock = threading.Lock()
        self._waiting: set[threading.Event] = set()
        self._queued: deque[Order] = deque()
        self._held: dict[str, dict[str, Order]] = {}  # by server
        self._results: dict[str, deque[tuple[str, bool, bytes]]] = {}  # by topic
        self._outstanding: dict[str, str] = {}  # topic by task ID: asked for, and its last result not taken yet
        self._servers: dict[str, ServerInfo] = {}
        self._stopping: bool | None = None  # whether to drain
        self._closed = False

    # --- the Thinker's side ---------------------------------------------------------------------------

    def send_request(self, task_id: str, topic: str, message: bytes) -> None:
        with self._changing():
            self._stopping = None
            self._outstanding[task_id] = topic
            self._queued.append(Order(task_id, topic, message))

    def take_result(self, topic: str, wait_s: float) -> bytes | None:
        return self._await(lambda: self._pop_result(topic), wait_s)

    def cancel(self, task_id: str) -> bool:
        with self._changing():
            order = next((order for order in self._queued if order.task_id == task_id), None)
            if order is not None:
                self._queued.remove(order)
            else:
                holder = next((held for held in self._held.values() if task_id in held), None)
                if holder is None:
                    return False
                order = holder.pop(task_id)
            self._fail(order, "the task was cancelled")
            return True

    def recover(self) -> dict[str, str]:
        """Topic by ID of all tasks whose last result has not been taken."""
        with self._lock:
            return dict(self._outstanding)

    def servers(self) -> list[ServerInfo]:
        with self._lock:
            return list(self._servers.values())

    def stop(self, drain: bool) -> None:
        with self._changing():
            self._stopping = drain

    def flush(self) -> None:
        with self._changing():
            self._queued.clear()
            self._results.clear()
            self._outstanding.clear()

    def close(self) -> None:
        """Let everybody who waits raise :class:`KillSignal`."""
        with self._changing():
            self._closed = True

    # --- the server's side ----------------------------------------------------------------------------

    def join(self, server: str, info: ServerInfo | None) -> None:
        with self._lock:
            self._held.setdefault(server, {})
            if info is not None:
                self._servers[server] = info

    def take_task(self, server: str, wait_s: float) -> Order | None:
        """The next task; None after ``wait_s`` seconds. Raises :class:`KillSignal`."""
        return self._await(lambda: self._pop_task(server), wait_s)

    def send_result(self, server: str, task_id: str, topic: str, complete: bool, message: bytes) -> bool:
        """Take a result in. False when this server does not hold the task: it was cancelled, or is another's now."""
        with self._changing():
            held = self._held.get(server, {})
            if task_id not in held:
                return False
            if complete:
                del held[task_id]
            self._results.setdefault(topic, deque()).append((task_id, complete, message))
            return True

    def holds(self, server: str, task_id: str) -> bool:
        with self._lock:
            return task_id in self._held.get(server, {})

    def give_back(self, server: str, task_id: str) -> None:
        with self._changing():
            order = self._held.get(server, {}).pop(task_id, None)
            if order is not None:
                self._queued.appendleft(order)

    def leave(self, server: str) -> None:
        """The server has ended or died: what it holds is handed out again."""
        with self._changing():
            self._servers.pop(server, None)
            for order in reversed(self._held.pop(server, {}).values()):
                if order.attempt >= self._max_attempts:
                    self._fail(order, f"{order.attempt} task servers took this task, and each of them died")
                else:
                    order.attempt += 1
                    self._queued.appendleft(order)

    # --- with the lock held ---------------------------------------------------------------------------

    def _pop_result(self, topic: str) -> bytes | None:
        waiting = self._results.get(topic)
        if not waiting:
            return None
        task_id, complete, message = waiting.popleft()
        if complete:
            self._outstanding.pop(task_id, None)
        return message

    def _pop_task(self, server: str) -> Order | None:
        if self._queued and self._stopping is not False:
            order = self._queued.popleft()
            self._held.setdefault(server, {})[order.task_id] = order
            return order
        if self._stopping is not None:
            raise KillSignal("the task servers of this queue have been told to stop")
        return None

    def _fail(self, order: Order, reason: str) -> None:
        task = unpack(order.message, allow_pickle=True)
        if not task.keep_inputs:
            task.inputs = ((), {})
        task.set_failure(FailureInformation(exception=reason))
        self._results.setdefault(order.topic, deque()).append((order.task_id, True, pack(task)))

    # --- waiting --------------------------------------------------------------------------------------

    def _await(self, attempt: Callable[[], T | None], wait_s: float) -> T | None:
        """What ``attempt`` finds, tried at once and after each change, for ``wait_s`` seconds."""
        deadline = self._clock.monotonic() + wait_s
        changed = threading.Event()
        with self._lock:
            self._waiting.add(changed)
        try:
            while True:
                changed.clear()
                with self._lock:
                    if self._closed:
                        raise KillSignal("this queue has been closed")
                    found = attempt()
                left = deadline - self._clock.monotonic()
                if found is not None or left <= 0:
                    return found
                self._clock.wait(changed, left)
        finally:
            with self._lock:
                self._waiting.discard(changed)

    def _changing(self) -> _Changing:
        return _Changing(self._lock, self._waiting)


class _Changing:
    """Holds the lock, and tells everybody who waits when it is let go."""

    def __init__(self, lock: threading.Lock, waiting: set[threading.Event]) -> None:
        self._lock = lock
        self._waiting = waiting

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        for changed in self._waiting:
            changed.set()
        self._lock.release()
