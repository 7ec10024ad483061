"""What the task servers of the tests run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def f(x: float) -> float:
    return x**2 - 3


def echo(*args: Any, **kwargs: Any) -> list[Any]:
    return [list(args), kwargs]


def same(value: Any) -> Any:
    return value


def many(count: int) -> bytes:
    return bytes(count)


def nothing() -> None:
    pass


def fail(text: str) -> None:
    raise ValueError(text)


def leave(code: int) -> None:
    sys.exit(code)


def crash(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def fail_times(count: int, folder: str) -> int:
    """Raises ``count`` times, and then returns how often it has been called."""
    before = len(list(Path(folder).iterdir()))
    Path(folder, str(before)).touch()
    if before < count:
        raise ValueError("not yet")
    return before + 1


def count_up(n: int) -> Iterator[int]:
    yield from range(n)
    return n


def call_back(n: int, _emit: Callable[[Any], None]) -> str:
    for number in range(n):
        _emit(number)
    return "end"


def where(_result: Any, _resources: Any) -> dict[str, Any]:
    return {"pid": os.getpid(), "task_id": _result.task_id, "threads": _resources.cpu_threads, "attempt": _result.worker_info.attempt}


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def unpicklable() -> Any:
    return lambda: None


def wait_for(path: str, announce: str | None = None) -> str:
    """Runs until there is a file ``path``; first writes its process ID to ``announce``."""
    if announce is not None:
        scratch = Path(f"{announce}.{os.getpid()}")
        scratch.write_text(str(os.getpid()))
        scratch.replace(announce)
    while not Path(path).exists():
        time.sleep(0.01)
    return path


def kill_server(server_pid_file: str) -> None:
    """Takes the whole node with it."""
    os.kill(int(Path(server_pid_file).read_text()), signal.SIGKILL)
    time.sleep(60)


def stream_tensors(n: int) -> Iterator[Any]:
    import torch

    for _ in range(n):
        yield torch.zeros(50_000)
    return "end"


def think_and_die(folder: str, log: str, tasks: int) -> None:
    """A Thinker that deals with two results and is killed before it deals with the third."""
    from gradientmail_torch.patterns.steering import MailboxQueues

    queues = MailboxQueues(folder, name="campaign", poll_interval=0.01, lease=1.0, auto_ack=False)
    for number in range(tasks):
        queues.send_inputs(number, method="same")
    for _ in range(2):
        result = queues.get_result(timeout=60)
        with Path(log).open("a") as file:
            file.write(f"{result.value}\n")
        queues.ack(result)
    queues.get_result(timeout=60)
    os.kill(os.getpid(), signal.SIGKILL)


def htex(run_dir: str, workers: int = 1) -> Any:
    """Parsl's high-throughput executor on this machine."""
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.providers import LocalProvider

    provider = LocalProvider(init_blocks=1, max_blocks=1, worker_init=f"export PYTHONPATH={os.pathsep.join(filter(None, sys.path))}")
    executor = HighThroughputExecutor(
        label="htex",
        address="127.0.0.1",
        max_workers_per_node=workers,
        provider=provider,
        encrypted=False,
        heartbeat_period=1,  # how often it looks whether a worker has died
        heartbeat_threshold=10,
    )
    return Config(executors=[executor], strategy="none", run_dir=run_dir, usage_tracking=0, initialize_logging=False)
