"""Tests of steering. The tasks are in a module of their own, which child processes can import."""

from __future__ import annotations

import multiprocessing.forkserver
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gradientmail_torch.patterns.steering import LocalTaskServer, PipeQueues, TaskQueues


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


def _end(server: Any) -> None:
    server.terminate()
    server.join(10)
    if server.is_alive():
        server.kill()
        server.join()
    multiprocessing.forkserver._forkserver._stop()
