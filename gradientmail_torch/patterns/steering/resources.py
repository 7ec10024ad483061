"""How many tasks of each kind may run at a time: a fixed number of slots, or as many as the task servers have."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, MailboxUnavailable
from gradientmail_torch.patterns.steering.queues.base import ServerInfo

log = logging.getLogger(__name__)

_CANCEL_CHECK_S = 0.5


class _HasServers(Protocol):
    clock: Clock

    def servers(self) -> list[ServerInfo]: ...


class ResourceCounter:
    """Counts slots, in pools by kind of task. All slots begin in the pool ``None``, those of no kind in particular.

    :meth:`acquire` takes free slots of a pool, :meth:`release` gives them back, :meth:`reallocate` moves slots from
    one pool to another. Who waits longest is served first. Safe to use from many threads.
    """

    def __init__(self, total_slots: int, task_types: Collection[str] = (), *, clock: Clock = SYSTEM_CLOCK) -> None:
        if None in task_types:
            raise ConfigError("None is the pool of slots without a kind, and no name for a task type")
        self._clock = clock
        self._lock = threading.Lock()
        self._allocated: dict[str | None, int] = dict.fromkeys((None, *task_types), 0)
        self._available: dict[str | None, int] = dict.fromkeys((None, *task_types), 0)
        self._waiting: dict[str | None, deque[threading.Event]] = {pool: deque() for pool in self._allocated}
        self._allocated[None] = self._available[None] = total_slots

    @classmethod
    def elastic(cls, queues: _HasServers, task_types: Collection[str] = (), *, refresh_s: float = 5.0) -> ResourceCounter:
        """Slots of the task servers that are there: more when one joins, fewer when one leaves, looked up every ``refresh_s`` seconds.

        New slots are in the pool None. Slots that go are taken from there first, then from the largest pool; where
        they are in use, their release makes none free.
        """
        return _ElasticCounter(queues, task_types, refresh_s=refresh_s)

    @property
    def total_slots(self) -> int:
        with self._lock:
            return sum(self._allocated.values())

    @property
    def unallocated_slots(self) -> int:
        """Slots in the pool None."""
        return self.allocated_slots(None)

    def allocated_slots(self, task: str | None) -> int:
        """Slots of a pool, free or in use."""
        with self._lock:
            return self._allocated[self._known(task)]

    def available_slots(self, task: str | None) -> int:
        """Free slots of a pool."""
        with self._lock:
            return max(0, self._available[self._known(task)])

    def release(self, task: str | None = None, n_slots: int = 1, rerequest: bool = False, timeout: float | None = None) -> bool | None:
        """Give slots back; with ``rerequest`` take them again, behind those who wait. Returns what :meth:`acquire` returned then."""
        with self._lock:
            self._available[self._known(task)] += n_slots
            self._wake(task)
        return self.acquire(task, n_slots, timeout) if rerequest else None

    def acquire(self, task: str | None, n_slots: int = 1, timeout: float | None = None, cancel_if: threading.Event | None = None) -> bool:
        """Take ``n_slots`` of a pool, all or none.

        False after ``timeout`` seconds (None or below 0: never), or once ``cancel_if`` is set.
        """
        deadline = inf if timeout is None or timeout < 0 else self._clock.monotonic() + timeout
        turn = threading.Event()
        with self._lock:
            self._waiting[self._known(task)].append(turn)
        try:
            while True:
                self._refresh()
                with self._lock:
                    if self._waiting[task][0] is turn and self._available[task] >= n_slots:
                        self._available[task] -= n_slots
                        return True
                left = deadline - self._clock.monotonic()
                if left <= 0 or (cancel_if is not None and cancel_if.is_set()):
                    return False
                pause_s = min(left, self._look_again_s, inf if cancel_if is None else _CANCEL_CHECK_S)
                self._clock.wait(turn, None if pause_s == inf else pause_s)
                turn.clear()
        finally:
            with self._lock:
                self._waiting[task].remove(turn)
                self._wake(task)

    def reallocate(
        self,
        task_from: str | None,
        task_to: str | None,
        n_slots: int | str,
        block: bool = True,
        callback: Callable[[], Any] | None = None,
        timeout: float | None = None,
        cancel_if: threading.Event | None = None,
    ) -> bool:
        """Move ``n_slots`` (or ``"all"`` of a pool's, in use or not) to another pool, as soon as they are free.

        Returns whether it did. With ``block=False`` a thread waits for it, calls ``callback``, and this returns True.
        """
        if task_from == task_to:
            raise ConfigError(f"slots cannot be moved from pool {task_from!r} to itself")
        if not block:

            def move() -> None:
                self.reallocate(task_from, task_to, n_slots, timeout=timeout, cancel_if=cancel_if)
                if callback is not None:
                    callback()

            self._clock.spawn(move, name=f"steering slots to {task_to}")
            return True
        count = self.allocated_slots(task_from) if n_slots == "all" else int(n_slots)
        self.allocated_slots(task_to)  # an unknown pool is noticed before anything is taken
        if not self.acquire(task_from, count, timeout, cancel_if):
            return False
        with self._lock:
            self._allocated[task_from] -= count
            self._allocated[task_to] += count
            self._available[task_to] += count
            self._wake(task_to)
        return True

    def _known(self, task: str | None) -> str | None:
        if task not in self._allocated:
            raise KeyError(f"unknown task type {task!r}: this counter has {', '.join(str(pool) for pool in self._allocated)}")
        return task

    def _wake(self, task: str | None) -> None:
        if self._waiting[task]:
            self._waiting[task][0].set()

    # --- where slots come from ------------------------------------------------------------------------

    _look_again_s = inf

    def _refresh(self) -> None:
        """Bring the number of slots up to date."""


class _ElasticCounter(ResourceCounter):
    def __init__(self, queues: _HasServers, task_types: Collection[str], *, refresh_s: float) -> None:
        super().__init__(0, task_types, clock=queues.clock)
        self._queues = queues
        self._look_again_s = refresh_s
        self._looked_at = -inf
        self._refresh()

    @property
    def total_slots(self) -> int:
        self._refresh()
        return super().total_slots

    def _refresh(self) -> None:
        now = self._clock.monotonic()
        with self._lock:
            if now - self._looked_at < self._look_again_s:
                return
            self._looked_at = now
        try:
            present = sum(server.slots for server in self._queues.servers())
        except MailboxUnavailable as error:
            log.warning("nobody knows which task servers are there: %s", error)
            return
        with self._lock:
            change = present - sum(self._allocated.values())
            if change > 0:
                self._grow(None, change)
            while change < 0:
                pool = None if self._allocated[None] else max(self._allocated, key=self._allocated.__getitem__)
                taken = min(-change, self._allocated[pool])
                self._grow(pool, -taken)
                change += taken

    def _grow(self, pool: str | None, slots: int) -> None:
        self._allocated[pool] += slots
        self._available[pool] += slots  # below 0 while more are in use than there are
        self._wake(pool)


@contextmanager
def reallocate_until(
    counter: ResourceCounter,
    *,
    gather_from: str | None,
    gather_to: str | None,
    disperse_to: str | None,
    max_slots: int | None,
    slot_step: int,
) -> Iterator[None]:
    """Within the block, move slots from one pool to another as they become free; all of that pool to ``disperse_to`` at its end."""
    stop = threading.Event()

    def gather() -> None:
        while not stop.is_set() and (max_slots is None or counter.allocated_slots(gather_to) < max_slots):
            counter.reallocate(gather_from, gather_to, slot_step, cancel_if=stop)

    task = counter._clock.spawn(gather, name=f"steering slots to {gather_to}")
    try:
        yield
    finally:
        stop.set()
        task.join()
    if gather_to != disperse_to:
        counter.reallocate(gather_to, disperse_to, "all")
