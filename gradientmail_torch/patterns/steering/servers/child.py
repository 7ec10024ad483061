"""A process that runs tasks for a server, one at a time.

It is a fresh process by default (``spawn``): CUDA is safe in it, its memory comes back, its main thread is free for
Lightning, and when it crashes, that is the task's result and nobody else's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, GradientMailError
from gradientmail_torch.patterns.steering.methods import Method, execute
from gradientmail_torch.patterns.steering.result import Result, WorkerInformation
from gradientmail_torch.patterns.steering.wire import pack, unpack

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

START_METHODS = ("spawn", "forkserver", "fork")
_LOOK_S = 0.5
_READY = b"ready"


class ChildDied(GradientMailError):
    """The process of a task ended before the task did."""


def context(start_method: str) -> Any:
    if start_method not in START_METHODS:
        raise ConfigError(f"start_method must be one of {', '.join(START_METHODS)}, not {start_method!r}")
    return multiprocessing.get_context(start_method)


def preload(methods: Mapping[str, Method]) -> None:
    """Have what ``methods`` need imported once, by the process that a fork server makes children from."""
    modules = {method.__module__ for method in methods.values()} | {"__main__"}
    multiprocessing.set_forkserver_preload(sorted(modules))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it would not look where this program looks
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@dataclass(frozen=True, slots=True)
class Job:
    """What the child is told, beside the task."""

    server: str
    attempt: int | None


class Child:
    """A child process, from the server's side. Used by one thread."""

    def __init__(self, methods: Mapping[str, Method], *, start_method: str) -> None:
        chosen = context(start_method)
        self._connection, theirs = chosen.Pipe()
        self._process: BaseProcess = chosen.Process(target=_serve, args=(theirs, self._connection, dict(methods)), name="steering task")
        try:
            self._process.start()
        except (AttributeError, TypeError, OSError, ImportError) as error:
            self._connection.close()
            raise ConfigError(
                f"the methods cannot be given to a new process ({error}). Define them at the top level of a module; "
                "or use start_method='fork', or isolation='thread'"
            ) from error
        finally:
            theirs.close()
        self._ready = False

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def await_ready(self, check: Callable[[], None]) -> None:
        """Wait until the process has imported what the methods need, which may take seconds. Raises as :meth:`run` does."""
        if not self._ready:
            try:
                self._receive(check)
            except (EOFError, OSError) as error:
                raise self._died() from error
            self._ready = True

    def run(self, task: Result, *, job: Job, emit: Callable[[Result], object], check: Callable[[], None]) -> Result:
        """Have ``task`` run. ``check`` is called now and then: when it raises, the process is killed.

        Raises what ``check`` raised, and :class:`ChildDied`; the child is of no use after either.
        """
        message = msgspec.msgpack.encode((job.server, job.attempt, pack(task)))
        try:
            self.await_ready(check)
            self._connection.send_bytes(message)
            while True:
                kind, body = msgspec.msgpack.decode(self._receive(check), type=tuple[str, bytes])
                result = unpack(body, allow_pickle=True)
                if kind == "done":
                    return result
                emit(result)
        except (EOFError, OSError) as error:
            raise self._died() from error

    def _receive(self, check: Callable[[], None]) -> bytes:
        while True:
            # A real process is waited for in real time: no simulated clock has a say.
            if multiprocessing.connection.wait([self._connection, self._process.sentinel], _LOOK_S):
                if not self._connection.poll():
                    raise self._died()
                return bytes(self._connection.recv_bytes())
            try:
                check()
            except BaseException:
                self.kill()
                raise

    def _died(self) -> ChildDied:
        self._process.join(_LOOK_S)
        code = self._process.exitcode
        self.kill()
        if code is None:
            how = "closed its connection"
        elif code < 0:
            how = f"was killed by {_signal_name(-code)}"
        else:
            how = f"ended with exit code {code}"
        return ChildDied(f"the process that ran the task {how}. Its standard error may say more; out of memory is a common cause")

    def kill(self) -> None:
        """End the process and all that it has started."""
        pid = self._process.pid
        if pid is not None and self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._process.kill()  # it may not have made its group yet
        self._process.join()
        self._connection.close()

    def close(self) -> None:
        """End an idle child."""
        self.kill()


def _serve(connection: Connection, other_end: Connection, methods: Mapping[str, Method]) -> None:
    """The child's main function."""
    other_end.close()
    with contextlib.suppress(OSError):
        os.setsid()  # a group of its own, to be killed as one; and a terminal's Ctrl-C is the server's business
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    SYSTEM_CLOCK.spawn(_die_with_parent, name="steering parent watch")
    connection.send_bytes(_READY)
    while True:
        try:
            server, attempt, message = msgspec.msgpack.decode(connection.recv_bytes(), type=tuple[str, int | None, bytes])
        except EOFError:
            return
        task = unpack(message, allow_pickle=True)
        result = execute(
            methods[task.method or ""],
            task,
            emit=lambda part: connection.send_bytes(msgspec.msgpack.encode(("part", pack(part)))),
            worker=WorkerInformation(server=server, attempt=attempt),
        )
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(msgspec.msgpack.encode(("done", pack(result))))


def _die_with_parent() -> None:
    """End this process and what it has started when its server dies: an orphan would work for nobody."""
    never = threading.Event()
    above = os.getppid()  # the server where it forked us, else a helper of multiprocessing's
    server = multiprocessing.parent_process()
    while os.getppid() == above and (server is None or server.is_alive()):
        SYSTEM_CLOCK.wait(never, _LOOK_S)
    with contextlib.suppress(OSError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
