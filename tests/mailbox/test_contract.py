"""Every backend and every wrapper keeps the mailbox's contract."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import boto3
import pytest
from moto.server import ThreadedMotoServer

from gradientmail_torch.mailbox import CountingMailbox, Mailbox, PrefixedMailbox, RetryingMailbox, open_mailbox
from gradientmail_torch.mailbox.local import LocalMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.mailbox.s3 import S3Mailbox
from gradientmail_torch.testing.contract import MailboxContract, MailboxShape


@pytest.fixture(scope="module")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class TestMemory(MailboxContract):
    @pytest.fixture
    def mailbox(self) -> Mailbox:
        return MemoryMailbox()


class TestLocal(MailboxContract):
    @pytest.fixture
    def mailbox(self, tmp_path: Path) -> Mailbox:
        return LocalMailbox(tmp_path / "mailbox")


@pytest.mark.s3
class TestS3(MailboxContract):
    @pytest.fixture
    def mailbox(self, s3_url: str) -> Mailbox:
        return open_mailbox(s3_url)


class TestS3OnMoto(MailboxShape):
    """The shape alone: moto checks a condition and writes in two steps, so that two can win."""

    MANY = 1100

    @pytest.fixture
    def mailbox(self, moto_url: str, monkeypatch: pytest.MonkeyPatch) -> Mailbox:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        bucket = f"bucket-{uuid4().hex}"
        boto3.client("s3", endpoint_url=moto_url, region_name="us-east-1").create_bucket(Bucket=bucket)
        return S3Mailbox(bucket, "some/prefix", endpoint_url=moto_url)


class TestPrefixed(MailboxContract):
    @pytest.fixture
    def mailbox(self) -> Mailbox:
        inner = MemoryMailbox()
        inner.put("other", b"")
        inner.put("part0", b"")
        return PrefixedMailbox(inner, "part")


class TestCounting(MailboxContract):
    @pytest.fixture
    def mailbox(self) -> Mailbox:
        return CountingMailbox(MemoryMailbox())


class TestRetrying(MailboxContract):
    @pytest.fixture
    def mailbox(self, tmp_path: Path) -> Mailbox:
        return RetryingMailbox(LocalMailbox(tmp_path))
