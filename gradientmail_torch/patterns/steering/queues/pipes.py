"""Queues for one machine: no service, no configuration beyond the topics."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection
from typing import Any
from uuid import uuid4

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import WorkFenced
from gradientmail_torch.patterns.steering.queues.base import QueueRole, ServerInfo, TaskQueues
from gradientmail_torch.patterns.steering.queues.desk import Desk, Order
from gradientmail_torch.patterns.steering.queues.office import Office, Visitor
from gradientmail_torch.patterns.steering.result import Result, WorkerInformation
from gradientmail_torch.patterns.steering.wire import pack, unpack

_offices: weakref.WeakValueDictionary[Any, Office] = weakref.WeakValueDictionary()
"""The offices of this process, by address."""
_queues: weakref.WeakSet[PipeQueues] = weakref.WeakSet()


class PipeQueues(TaskQueues):
    """Queues over the pipes of one machine, held by the process that makes them.

    That process is usually the Thinker's; task servers may run in it or in any process to which the queues are
    given (with any start method). What is sent waits in its memory, without bound. A task server that dies has its
    tasks handed to the next, ``max_attempts`` times; without any server for ``server_timeout`` seconds, waiting for
    results raises :class:`~gradientmail_torch.errors.NoTaskServer`. Values are pickled: the machine is one.
    """

    def __init__(
        self,
        topics: Collection[str] = (),
        serialization_method: str = "pickle",
        keep_inputs: bool = True,
        *,
        server_timeout: float | None = 60.0,
        max_attempts: int = 3,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._party = ""
        self._info: ServerInfo | None = None
        super().__init__(topics, serialization_method, keep_inputs, server_timeout=server_timeout, clock=clock)
        office = Office(Desk(clock=clock, max_attempts=max_attempts), clock=clock)
        self._office: Office | None = office
        self._address, self._secret = office.address, office.secret
        _offices[office.address] = office

    def _reset(self) -> None:
        super()._reset()
        self._visitor: Visitor | None = None
        self._party = self._party if self.role is QueueRole.SERVER else uuid4().hex
        _queues.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_office", "_visitor")} | {"_office": None}

    # --- the Thinker's side ---------------------------------------------------------------------------

    def _send_request(self, task: Result) -> None:
        self._call("send_request", task.task_id, task.topic, pack(task))

    def _take_result(self, topic: str, wait_s: float) -> Result | None:
        message = self._call("take_result", topic, wait_s)
        return None if message is None else unpack(message, allow_pickle=True)

    def cancel(self, task_id: str) -> bool:
        return bool(self._call("cancel", task_id))

    def recover(self) -> list[str]:
        found: dict[str, str] = self._call("recover")
        for task_id, topic in found.items():
            self._register(task_id, topic)
        return list(found)

    def servers(self) -> list[ServerInfo]:
        found = self._call("servers")
        return [info if isinstance(info, ServerInfo) else ServerInfo(**info) for info in found]

    def send_kill_signal(self, drain: bool = True) -> None:
        self._check_role(QueueRole.CLIENT, "send_kill_signal")
        self._call("stop", drain)

    def flush(self) -> None:
        self._call("flush")
        for task_id in list(self._active):
            self._finished(task_id)

    # --- the server's side ----------------------------------------------------------------------------

    def for_server(self, info: ServerInfo) -> PipeQueues:
        end = type(self).__new__(type(self))
        end.__dict__.update(self.__getstate__(), role=QueueRole.SERVER, _party=uuid4().hex, _info=info)
        end._reset()
        if (desk := end._desk()) is not None:
            desk.join(end._party, info)
        return end

    def _take_task(self, wait_s: float) -> Result | None:
        desk = self._desk()
        order: Order | None = desk.take_task(self._party, wait_s) if desk is not None else self._remote().take_task(wait_s)
        if order is None:
            return None
        task = unpack(order.message, allow_pickle=True)
        task.worker_info = WorkerInformation(attempt=order.attempt)
        return task

    def _send_result(self, result: Result) -> None:
        arguments = (result.task_id, result.topic or "default", result.complete is not False, pack(result))
        if not self._serve("send_result", *arguments):
            raise WorkFenced(f"task {result.task_id} was cancelled, or another server has taken it over: this result was refused")

    def give_back(self, task: Result) -> None:
        self._serve("give_back", task.task_id)

    def is_revoked(self, task: Result) -> bool:
        return not self._serve("holds", task.task_id)

    # --- where the desk is ----------------------------------------------------------------------------

    def _desk(self) -> Desk | None:
        office = _offices.get(self._address)
        return office.desk if office is not None else None

    def _remote(self) -> Visitor:
        with self._lock:
            if self._visitor is None:
                self._visitor = Visitor(self._address, self._secret, party=self._party, info=self._info)
            return self._visitor

    def _call(self, operation: str, *arguments: object) -> Any:
        """An operation of the Thinker's side."""
        office = _offices.get(self._address)
        if office is None:
            return self._remote().call(operation, *arguments)
        office.open()
        return getattr(office.desk, operation)(*arguments)

    def _serve(self, operation: str, *arguments: object) -> Any:
        """An operation of the server's side, whose first argument is who serves."""
        desk = self._desk()
        return self._remote().call(operation, *arguments) if desk is None else getattr(desk, operation)(self._party, *arguments)

    def open(self) -> None:
        if (office := _offices.get(self._address)) is not None:
            office.open()

    def close(self) -> None:
        """End this object's part. On the object that was made first, end the queue."""
        if self.role is QueueRole.SERVER and (desk := self._desk()) is not None:
            desk.leave(self._party)
        if self._visitor is not None:
            self._visitor.close()
        if self._office is not None:
            self._office.close()
            _offices.pop(self._address, None)


def _become_remote() -> None:
    """In a forked child: the offices are the parent's, to be called from here."""
    _offices.clear()
    for queues in list(_queues):
        queues._office = None
        queues._reset()


os.register_at_fork(after_in_child=_become_remote)
