"""Tests of steering. The tasks are in a module of their own, which child processes can import."""

from __future__ import annotations

import multiprocessing.forkserver
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mailbox_nodes import METHODS, Node, until

from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.steering import LocalTaskServer, MailboxQueues, MailboxTaskServer, PipeQueues, TaskQueues


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test has started, in reverse."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pipes(stack: ExitStack) -> Callable[..., PipeQueues]:
    """Makes ``PipeQueues`` that are closed after the test."""
    return lambda *topics, **settings: stack.enter_context(PipeQueues(topics=topics, **settings))


@pytest.fixture
def serve(stack: ExitStack) -> Callable[..., Any]:
    """Starts a task server in a process of its own, which has ended after the test."""

    def start(server: Any) -> Any:
        server.start()
        stack.callback(_end, server)
        return server

    return start


@pytest.fixture
def local(serve: Callable[..., Any]) -> Callable[..., LocalTaskServer]:
    """Starts a ``LocalTaskServer``."""

    def start(methods: list[Callable[..., Any]], queues: TaskQueues, **settings: Any) -> LocalTaskServer:
        server: LocalTaskServer = serve(LocalTaskServer(methods, queues, **settings))
        return server

    return start


@pytest.fixture
def node(stack: ExitStack, serve: Callable[..., Any]) -> Node:
    """Starts a task server: a process where the mailbox can be reached from one, else a thread."""

    def start(queues: MailboxQueues, name: str = "node-0", **settings: Any) -> MailboxTaskServer:
        server = MailboxTaskServer(METHODS, queues, learner_id=name, **{"watch_interval_s": 0.05} | settings)
        if not isinstance(queues._where, Mailbox) and not str(queues._where).startswith("memory:"):
            return serve(server)
        thread = threading.Thread(target=server.run, name=name)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        until(lambda: any(info.server_id == name for info in queues.servers()))
        return server

    return start


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "mailbox")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def shared_url(request: pytest.FixtureRequest, folder: str) -> str:
    """A mailbox that processes share."""
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else folder


def _end(server: Any) -> None:
    server.terminate()
    server.join(10)
    if server.is_alive():
        server.kill()
        server.join()
    multiprocessing.forkserver._forkserver._stop()
