"""Real processes, killed with SIGKILL, over what two processes can share. Cases 7, 8 and 12 of the synchronization node."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.queue import SharedQueue
from gradientmail_torch.patterns.synchronization import Invocation, SynchronizationNode

LEASE_S = 2.0


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else (tmp_path / "box").as_uri()


@contextmanager
def process(code: str, *arguments: str) -> Iterator[Callable[[], None]]:
    """Runs ``code`` until it prints ``ready``; what is given kills it. It is dead at the end in any case."""
    running = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None

    def kill() -> None:
        running.send_signal(signal.SIGKILL)
        running.wait()

    try:
        with running.stdout:
            assert running.stdout.readline() == "ready\n"
            yield kill
    finally:
        kill()


NODE = """
import sys, threading
from gradientmail_torch.patterns.synchronization import SynchronizationNode
node = SynchronizationNode("meet", ["mine", "other"], sys.argv[1], "mortal", lease=2.0, poll_interval=0.2)
def ready(*_):
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_07_a_last_arriver_killed_after_its_marker_is_replaced_at_the_next_look(url: str) -> None:
    node = SynchronizationNode("meet", ["mine", "other"], url, "alive", lease=LEASE_S, poll_interval=0.2)
    node.call("mine", 1)
    with process(NODE + "node.call('other', 2)\nready()", url) as kill:
        kill()
        began = SYSTEM_CLOCK.monotonic()
        result = node.wait(lambda data, invocation: data, timeout=30)
    assert (result.value, result.attempt) == ({"mine": 1, "other": 2}, 1)
    assert SYSTEM_CLOCK.monotonic() - began < LEASE_S, "nobody waited for a lease"


def test_08_a_runner_killed_inside_the_function_is_replaced_after_the_lease(url: str) -> None:
    node = SynchronizationNode("meet", ["mine", "other"], url, "alive", lease=LEASE_S, poll_interval=0.2)
    node.call("mine", 1)
    with process(NODE + "node.call('other', 2)\nnode.wait(ready)", url) as kill:
        kill()
        result = node.wait(lambda data, invocation: [data, invocation.attempt], timeout=60)
    assert result.value == [{"mine": 1, "other": 2}, 2]
    assert result.attempt == 2


def test_12_a_function_that_takes_three_leases_of_pure_computing_is_not_taken_over(url: str) -> None:
    parties = [SynchronizationNode("meet", ["mine"], url, name, lease=LEASE_S, poll_interval=0.2) for name in "ab"]
    parties[0].call("mine", 1)
    attempts = []

    def busy(data: object, invocation: Invocation) -> str:
        attempts.append(invocation.attempt)
        end = SYSTEM_CLOCK.monotonic() + 3 * LEASE_S
        while SYSTEM_CLOCK.monotonic() < end:
            sum(range(1000))
        return "done"

    other = threading.Thread(target=parties[1].wait, args=(busy,))
    other.start()
    assert parties[0].wait(busy, timeout=60).attempt == 1
    other.join()
    assert attempts == [1]


FROZEN = """
import ctypes, sys
from gradientmail_torch.patterns.synchronization import SynchronizationNode
node = SynchronizationNode("meet", ["mine"], sys.argv[1], "frozen", lease=2.0, poll_interval=0.2, max_freeze=float(sys.argv[2]))
node.call("mine", 1)
def freeze(data, invocation):
    print("ready", flush=True)
    ctypes.PyDLL(None).usleep(int(float(sys.argv[3]) * 1e6))  # holds the global lock
    return "frozen's"
node.wait(freeze)
"""


def test_12_a_function_of_three_leases_that_holds_the_global_lock_is_not_taken_over(url: str) -> None:
    with process(FROZEN, url, "30", str(3 * LEASE_S)):
        node = SynchronizationNode("meet", ["mine"], url, "alive", lease=LEASE_S, poll_interval=0.2)
        result = node.wait(lambda data, invocation: "taken over", timeout=60)
    assert (result.value, result.attempt) == ("frozen's", 1)


def test_12_but_not_for_longer_than_it_said(url: str) -> None:
    with process(FROZEN, url, str(LEASE_S), "60"):
        node = SynchronizationNode("meet", ["mine"], url, "alive", lease=LEASE_S, poll_interval=0.2)
        assert node.wait(lambda data, invocation: "taken over", timeout=60).value == "taken over"


def test_08_a_helper_dies_with_its_process(url: str) -> None:
    with process(FROZEN, url, "60", "60") as kill:
        kill()
        node = SynchronizationNode("meet", ["mine"], url, "alive", lease=LEASE_S, poll_interval=0.2)
        began = SYSTEM_CLOCK.monotonic()
        assert node.wait(lambda data, invocation: "taken over", timeout=60).value == "taken over"
    assert SYSTEM_CLOCK.monotonic() - began < 30.0


@pytest.mark.parametrize("mailbox", [MemoryMailbox(), "memory://name"])
def test_help_needs_a_mailbox_that_another_process_can_open(mailbox: object) -> None:
    with pytest.raises(ConfigError, match="another process can open"):
        SharedQueue("q", mailbox, "a", max_freeze=1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another process can open"):
        SynchronizationNode("n", ["a"], mailbox, "a", max_freeze=1.0)  # type: ignore[arg-type]


QUEUE = """
import sys, threading
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.queue import SharedQueue
queue = SharedQueue("shards", sys.argv[1], "mortal", lease=2.0, poll_interval=0.2)
for item in queue:
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_the_item_of_a_killed_node_is_taken_over(url: str) -> None:
    queue = SharedQueue("shards", url, "alive", lease=LEASE_S, poll_interval=0.2)
    queue.fill(["x", "y", "z"])
    with process(QUEUE, url) as kill:
        kill()
        taken = [(task.value, task.attempt) for task in queue.tasks()]
    assert sorted(taken) == [("x", 2), ("y", 1), ("z", 1)]  # type: ignore[type-var]
    assert queue.progress().done == 3
