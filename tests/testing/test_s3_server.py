"""The S3 server for tests, examples and benchmarks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.testing.s3_server import S3Server

pytestmark = pytest.mark.s3


def test_acknowledged_objects_outlive_a_crash_and_the_url_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: S3Server
) -> None:
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        url, pid = server.url("run"), server.pid
        open_mailbox(url).put("a/b", b"kept")
        server.restart()
        assert server.pid not in (pid, s3_server.pid, None)
        assert server.url("run") == url
        assert open_mailbox(url).get("a/b") == b"kept"
    assert server.pid is None


def test_it_listens_on_loopback_alone(s3_server: S3Server) -> None:
    inodes = {os.readlink(link) for link in Path(f"/proc/{s3_server.pid}/fd").iterdir()}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    listening = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert listening
    assert set(listening) == {loopback}


def test_stopping_leaves_no_files_outside_its_directory(tmp_path: Path) -> None:
    with S3Server(tmp_path) as server:
        ports = list(server._ports.values())
    assert not [left for port in ports for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]
