"""Colmena's own Thinkers and task servers over a mailbox (extra ``[colmena]``), together with ours or without.

::

    queues = MailboxQueues("s3://bucket/run", topics=["trial"])
    colmena.thinker.BaseThinker(ColmenaMailboxQueues(queues))
    colmena.task_server.local.LocalTaskServer(ColmenaMailboxQueues(queues, methods=["fit"], slots=2), [fit])

Values must be what Colmena's serialization can hold: JSON without tensors, or pickle.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Collection
from typing import Any
from uuid import uuid4

from gradientmail_torch.errors import ConfigError, CorruptObject, KillSignal, WorkFenced
from gradientmail_torch.patterns.steering.queues.base import ServerInfo
from gradientmail_torch.patterns.steering.queues.mailbox import MailboxQueues
from gradientmail_torch.patterns.steering.result import Result
from gradientmail_torch.patterns.steering.serialization import Payload
from gradientmail_torch.patterns.steering.wire import dump, load

try:
    from colmena.exceptions import KillSignalException, TimeoutException
    from colmena.queue.base import ColmenaQueues
except ImportError as error:
    raise ConfigError("Colmena's Thinkers and servers need the package colmena: pip install 'gradientmail-torch[colmena]'") from error

log = logging.getLogger(__name__)

_LOOK_S = 0.5


class ColmenaMailboxQueues(ColmenaQueues):
    """:class:`MailboxQueues` in the form that Colmena's own classes take.

    Args:
        queues: the mailbox's queues.
        methods: for a task server: the methods that it offers.
        slots: for a task server: tasks that it holds at a time. Colmena's servers would take all that there are.
        server_id: for a task server: its name.
    """

    def __init__(self, queues: MailboxQueues, *, methods: Collection[str] = (), slots: int = 1, server_id: str | None = None) -> None:
        super().__init__(queues.topics, serialization_method=queues.serialization_method, keep_inputs=queues.keep_inputs)
        self._queues = queues
        name = server_id or f"colmena-{platform.node()}-{uuid4().hex[:8]}"
        self._info = ServerInfo(server_id=name, slots=slots, methods=tuple(methods), host=platform.node())
        self._reset()

    def _reset(self) -> None:
        self._own_lock = threading.Lock()
        self._made_by = os.getpid()
        self._end: MailboxQueues | None = None
        self._held: set[str] = set()
        self._room = threading.Event()
        self._stopping = False

    def __getstate__(self) -> dict[str, Any]:
        own = ("_own_lock", "_end", "_held", "_room")
        return {name: value for name, value in super().__getstate__().items() if name not in own}  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._reset()

    # --- the Thinker's side ---------------------------------------------------------------------------

    def _send_request(self, message: str, topic: str) -> None:
        if message == "null":
            self._queues.send_kill_signal()
        else:
            self._queues._submit(self._parsed(message), topic)

    def _get_result(self, topic: str, timeout: float | None = None) -> str:
        try:
            result = self._queues._wait_for_result(topic, timeout)
        except TimeoutError as error:
            raise TimeoutException() from error
        self._queues._settle(result)
        self._queues.ack(result)
        return _text(result)

    def flush(self) -> None:
        self._queues.flush()

    # --- the server's side ----------------------------------------------------------------------------

    def _get_request(self, timeout: float | None = None) -> tuple[str, str]:
        end = self._server_end()
        clock = self._queues.clock
        deadline = None if timeout is None else clock.monotonic() + timeout
        while len(self._held) >= self._info.slots:
            end.tend()
            if deadline is not None and clock.monotonic() >= deadline:
                raise TimeoutException()
            clock.wait(self._room, _LOOK_S)
            self._room.clear()
        try:
            topic, task = end.get_task(None if deadline is None else max(0.0, deadline - clock.monotonic()))
        except TimeoutError as error:
            raise TimeoutException() from error
        except KillSignal as error:
            self._stopping = True
            self._let_go(None)
            raise KillSignalException() from error
        with self._own_lock:
            self._held.add(task.task_id)
        return topic, _text(end.ready(task))

    def _send_result(self, message: str, topic: str) -> None:
        result = self._parsed(message)
        try:
            self._server_end().send_result(result)
        except WorkFenced as error:
            log.info("%s", error)
        if result.complete is not False:
            self._let_go(result.task_id)

    def _let_go(self, task_id: str | None) -> None:
        """``task_id`` has ended. When the last one has, and no more will come, this server leaves."""
        with self._own_lock:
            self._held.discard(task_id or "")
            leaving = self._end if self._stopping and not self._held else None
        self._room.set()
        if leaving is not None:
            leaving.close()

    def _server_end(self) -> MailboxQueues:
        with self._own_lock:
            if self._made_by != os.getpid():  # forked: connections are the parent's, and so would be its threads
                again = MailboxQueues.__new__(MailboxQueues)
                again.__setstate__(self._queues.__getstate__())
                self._queues, self._made_by = again, os.getpid()
            if self._end is None:
                if not self._info.methods:
                    raise ConfigError("a task server needs methods=[…]: the names of what it offers")
                self._end = self._queues.for_server(self._info)
            return self._end

    def _parsed(self, message: str) -> Result:
        return load(message, _refuse_reference, allow_pickle=self._queues.serialization_method == "pickle")


def _text(result: Result) -> str:
    return dump(result, Payload.text).decode()


def _refuse_reference(reference: Any) -> Any:
    raise CorruptObject(f"a message of Colmena's holds a value that is no string: {reference!r}")
