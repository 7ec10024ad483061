"""What all tests share: guards against leaks, mailboxes, and a real S3 server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.s3_server import S3Server

pytest.register_assert_rewrite("gradientmail_torch.testing.contract")
pytest_plugins = ["pytester"]
# Shells start what they put into the background with SIGINT ignored, which the processes of tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

_ENDING_S = 10.0
_kept: set[str] = set()  # processes of the whole session
# Pools and helpers of other libraries, which keep threads for the life of the process.
_FOREIGN_THREADS = ("ThreadPoolExecutor-", "asyncio_", "pydevd", "tqdm_monitor", "QueueFeederThread")
# What Lightning and its friends set once and leave.
_FOREIGN_VARIABLES = {
    *("PYTEST_CURRENT_TEST", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"),
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "CRC32C_SW_MODE"),
}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.name.startswith(_FOREIGN_THREADS)}


def _children() -> dict[str, str]:
    """Process IDs of this process's children, with their command lines."""
    found = {}
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            for pid in task.read_text().split():
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:  # ended meanwhile
            continue
    return {pid: command for pid, command in found.items() if pid not in _kept and "multiprocessing.resource_tracker" not in command}


@pytest.fixture(autouse=True)
def _no_leaked_thread() -> Iterator[None]:
    before = _threads()
    yield
    leaked = _threads() - before
    for thread in leaked:
        thread.join(_ENDING_S)
    alive = sorted(thread.name for thread in leaked if thread.is_alive())
    assert not alive, f"the test left threads running: {alive}"


@pytest.fixture(autouse=True)
def _no_leaked_process() -> Iterator[None]:
    before = _children()
    yield
    leaked = {pid: command for pid, command in _children().items() if pid not in before}
    assert not leaked, f"the test left processes behind: {leaked}"


@pytest.fixture(autouse=True)
def _no_leaked_variable() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} - _FOREIGN_VARIABLES
    os.environ.clear()
    os.environ.update(before)
    assert not changed, f"the test left environment variables changed: {sorted(changed)}"


@pytest.fixture
def mailbox() -> MemoryMailbox:
    """An empty mailbox in memory."""
    return MemoryMailbox()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server, started once. A test that stops or restarts it starts one of its own instead."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        _kept.add(str(server.pid))
        yield server


@pytest.fixture
def s3_credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def s3_url(s3_server: S3Server, s3_credentials: None) -> str:
    """The URL of an empty mailbox on the S3 server, with the credentials in the environment."""
    return s3_server.url(f"run-{uuid4().hex}")


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.s3)])
def mailbox_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty mailbox, for each backend."""
    urls: dict[str, Callable[[], str]] = {
        "memory": lambda: f"memory://{uuid4().hex}",
        "file": lambda: (tmp_path / "mailbox").as_uri(),
        "s3": lambda: request.getfixturevalue("s3_url"),
    }
    return urls[request.param]()
