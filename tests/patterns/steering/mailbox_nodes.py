"""What the tests of steering over a mailbox share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from steering_tasks import (
    count_up,
    crash,
    echo,
    f,
    fail,
    fail_times,
    kill_server,
    many,
    nothing,
    same,
    stream_tensors,
    wait_for,
    where,
)

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.keys import TaskKeys
from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.patterns.steering import MailboxQueues, MailboxTaskServer, Result, ServerInfo
from gradientmail_torch.patterns.steering.methods import execute
from gradientmail_torch.testing.faults import Crash

QUICK = {"poll_interval": 0.01, "lease": 1.0}
METHODS = [f, echo, same, many, fail, crash, nothing, count_up, stream_tensors, where, wait_for, fail_times, kill_server]
Node = Callable[..., MailboxTaskServer]


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        SYSTEM_CLOCK.sleep(0.005)


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def results_of(queues: MailboxQueues, count: int, topic: str = "default") -> list[Result]:
    return [queues.get_result(topic, timeout=60) for _ in range(count)]


def objects(url: Any, part: str, name: str = "default") -> list[str]:
    return list(open_mailbox(url).list(TaskKeys.of(name).root + part))


def serve_one(end: MailboxQueues) -> None:
    _, task = end.get_task(timeout=30)
    end.send_result(execute(same, end.ready(task), emit=end.send_result))


@contextlib.contextmanager
def server_end(queues: MailboxQueues) -> Iterator[MailboxQueues]:
    end = queues.for_server(ServerInfo(server_id="mortal", slots=1, methods=("same",)))
    try:
        yield end
    finally:
        with contextlib.suppress(Crash):
            end._server._work.close()
        with contextlib.suppress(Crash):
            end._server._presence.close()
