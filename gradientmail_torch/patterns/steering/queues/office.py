"""A :class:`Desk` for other processes of this machine: calls over Unix sockets (pipes on Windows), one thread per connection.

A connection's end is how a process's death is noticed. So no child may keep a copy of one: a forked child closes
what it has inherited.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
from collections import Counter
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import msgspec

from gradientmail_torch.clock import Clock, Task
from gradientmail_torch.errors import KillSignal
from gradientmail_torch.patterns.steering.queues.base import ServerInfo
from gradientmail_torch.patterns.steering.queues.desk import Desk, Order

log = logging.getLogger(__name__)

_STOP = "stop"
_BROKEN = (EOFError, OSError, AuthenticationError)


class Office:
    """Serves one desk. Nothing runs before :meth:`open`, so that a process may still be forked."""

    def __init__(self, desk: Desk, *, clock: Clock) -> None:
        self.desk = desk
        self.secret = secrets.token_bytes(32)
        self._clock = clock
        self._listener = Listener(authkey=self.secret, backlog=64)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._connections: dict[Connection, Task | None] = {}
        self._present: Counter[str] = Counter()  # connections by party
        self._door: Task | None = None
        self._closing = False
        _inherited.add(self)

    def open(self) -> None:
        """Begin to answer. Idempotent."""
        with self._lock:
            if self._door is None and not self._closing:
                self._door = self._clock.spawn(self._admit, name="steering queue")

    def close(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            door = self._door
            connections = list(self._connections)
        self.desk.close()
        if door is not None:
            try:
                Client(self.address, authkey=self.secret).close()  # lets the waiting accept return
            except _BROKEN:
                pass
            door.join()
        _inherited.discard(self)
        self._listener.close()
        for connection in connections:
            _shut(connection)
        for task in [task for task in self._connections.values() if task]:
            task.join()

    def close_inherited(self) -> None:
        """In a forked child: the office is the parent's."""
        self._closing = True
        self._listener._listener._socket.close()  # type: ignore[attr-defined]  # close() would remove the parent's file
        for connection in self._connections:
            connection.close()

    def _admit(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except _BROKEN as error:
                if self._closing:
                    return
                log.debug("a process could not be admitted to the queue: %s", error)
                continue
            with self._lock:
                if self._closing:
                    connection.close()
                    return
                self._connections[connection] = None
            task = self._clock.spawn(partial(self._attend, connection), name="steering queue connection")
            with self._lock:
                if connection in self._connections:
                    self._connections[connection] = task

    def _attend(self, connection: Connection) -> None:
        party = ""
        try:
            party, info = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[str, ServerInfo | None])
            with self._lock:
                self._present[party] += 1
            self.desk.join(party, info)
            while True:
                operation, arguments = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[str, list[Any]])
                connection.send_bytes(msgspec.msgpack.encode(self._answer(party, operation, arguments)))
        except _BROKEN:
            pass  # it has ended, or we have
        finally:
            with self._lock:
                self._connections.pop(connection, None)
                self._present[party] -= 1
                gone = not self._present[party]
            connection.close()
            if gone and not self._closing:
                self.desk.leave(party)

    def _answer(self, party: str, operation: str, arguments: list[Any]) -> Any:
        try:
            if operation in ("take_task", "send_result", "holds", "give_back"):
                return getattr(self.desk, operation)(party, *arguments)
            return getattr(self.desk, operation)(*arguments)
        except KillSignal:
            return _STOP


class Visitor:
    """The desk of another process. Each thread that calls gets a connection of its own."""

    def __init__(self, address: Any, secret: bytes, *, party: str, info: ServerInfo | None) -> None:
        self._address = address
        self._secret = secret
        self._party = party
        self._info = info
        self._lock = threading.Lock()
        self._own = threading.local()
        self._connections: list[Connection] = []
        _inherited.add(self)

    def take_task(self, wait_s: float) -> Order | None:
        found = self.call("take_task", wait_s)
        return None if found is None else msgspec.convert(found, Order)

    def call(self, operation: str, *arguments: object) -> Any:
        """Raises :class:`KillSignal` when told to, and when the process with the desk is gone."""
        try:
            connection = self._connection()
            connection.send_bytes(msgspec.msgpack.encode((operation, arguments)))
            answer = msgspec.msgpack.decode(connection.recv_bytes())
        except _BROKEN as error:
            raise KillSignal("the process that made this queue has ended") from error
        if answer == _STOP:
            raise KillSignal("the task servers of this queue have been told to stop")
        return answer

    def close(self) -> None:
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    close_inherited = close

    def _connection(self) -> Connection:
        found: Connection | None = getattr(self._own, "connection", None)
        if found is None or found.closed:
            found = Client(self._address, authkey=self._secret)
            found.send_bytes(msgspec.msgpack.encode((self._party, self._info)))
            self._own.connection = found
            with self._lock:
                self._connections.append(found)
        return found


def _shut(connection: Connection) -> None:
    """End a connection that another thread reads from: closing alone would leave it reading."""
    import socket

    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


_inherited: weakref.WeakSet[Office | Visitor] = weakref.WeakSet()


def _close_inherited() -> None:
    for found in list(_inherited):
        found._lock = threading.Lock()  # another thread of the parent may have held it
        found.close_inherited()
    _inherited.clear()


os.register_at_fork(after_in_child=_close_inherited)
