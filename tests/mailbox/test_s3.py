"""The S3 mailbox on a real server behind a bad network."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from uuid import uuid4

import pytest

from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox, open_mailbox
from gradientmail_torch.mailbox.s3 import MULTIPART_BYTES, S3Mailbox
from gradientmail_torch.testing.contract import together
from gradientmail_torch.testing.proxy import Fault, FaultProxy, Request
from gradientmail_torch.testing.s3_server import S3Server

pytestmark = pytest.mark.s3

STRIKES = [Fault.LOSE_ANSWER, Fault.HANG_UP, Fault.REFUSE]


@pytest.fixture
def proxy(s3_server: S3Server, s3_credentials: None) -> Iterator[FaultProxy]:
    with FaultProxy("127.0.0.1", int(s3_server.endpoint_url.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture
def bare(proxy: FaultProxy, s3_server: S3Server) -> S3Mailbox:
    """Without retries."""
    return S3Mailbox(s3_server.bucket, uuid4().hex, endpoint_url=proxy.endpoint_url)


@pytest.fixture
def mailbox(bare: S3Mailbox) -> Mailbox:
    return RetryingMailbox(bare, first_wait_s=0.01)


def first(number: int, fault: Fault, method: str) -> Callable[[Request], Fault | None]:
    seen = count(1)
    return lambda request: fault if request.method == method and next(seen) <= number else None


@pytest.mark.parametrize("fault", STRIKES)
def test_boto3_retries_nothing_by_itself(fault: Fault, bare: S3Mailbox, proxy: FaultProxy) -> None:
    operations: dict[str, Callable[[], object]] = {
        "PUT": lambda: bare.put_if_absent("a", b"x"),
        "GET": lambda: bare.get("a"),
        "DELETE": lambda: bare.delete("a"),
    }
    for method, operation in operations.items():
        proxy.fault = first(1, fault, method)
        with pytest.raises(MailboxUnavailable, match="'a' in s3://gradientmail/"):
            operation()
    proxy.fault = first(1, fault, "GET")
    with pytest.raises(MailboxUnavailable):
        list(bare.list(""))


@pytest.mark.parametrize("fault", STRIKES)
def test_a_create_is_honest_whatever_happens_to_its_answer(fault: Fault, mailbox: Mailbox, proxy: FaultProxy) -> None:
    proxy.fault = first(2, fault, "PUT")
    assert mailbox.put_if_absent("ours", b"our nonce")
    assert proxy.fired[fault] == 2
    proxy.fault = first(2, fault, "PUT")
    assert not mailbox.put_if_absent("ours", b"their nonce")
    assert mailbox.get("ours") == b"our nonce"


def test_of_many_that_race_behind_a_network_that_loses_answers_one_wins(mailbox: Mailbox, proxy: FaultProxy) -> None:
    seen = count()
    proxy.fault = lambda request: Fault.LOSE_ANSWER if request.conditional and next(seen) % 3 == 0 else None
    for race in range(5):
        won = together(range(16), lambda racer, race=race: mailbox.put_if_absent(f"race/{race}", f"racer {racer}".encode()))
        assert sum(won) == 1
        assert mailbox.get(f"race/{race}") == f"racer {won.index(True)}".encode()
    assert proxy.fired[Fault.LOSE_ANSWER] > 20


@pytest.mark.parametrize("fault", [*STRIKES, Fault.CUT_ANSWER])
def test_every_operation_survives_a_bad_network(fault: Fault, mailbox: Mailbox, proxy: FaultProxy) -> None:
    for method in ("GET", "PUT", "DELETE"):
        proxy.fault = first(1, fault, method)
        mailbox.put("a", b"content")
        assert mailbox.get("a") == b"content"
        assert [*mailbox.list("")] == ["a"]
        mailbox.delete("a")
        assert mailbox.get("a") is None
    assert proxy.fired[fault] >= 2


@pytest.mark.parametrize("fault", STRIKES)
def test_a_large_upload_that_fails_on_the_way_begins_again(fault: Fault, mailbox: Mailbox, proxy: FaultProxy) -> None:
    body = bytes(range(256)) * (2 * MULTIPART_BYTES // 256) + b"end"
    with tempfile.TemporaryFile() as file:
        file.write(b"skipped" + body)
        file.seek(7)
        proxy.fault = first(2, fault, "PUT")
        mailbox.put("large", file)
    assert mailbox.get("large") == body


def test_a_server_that_is_away_or_starts_again_is_waited_for(tmp_path: Path, s3_credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tmp_path) as server:
        bare = S3Mailbox(server.bucket, "run", endpoint_url=server.endpoint_url)
        bare.put("a", b"kept")
        server.stop()
        with pytest.raises(MailboxUnavailable):
            bare.get("a")
        server.restart()
        assert open_mailbox(server.url("run")).get("a") == b"kept"


def test_a_name_is_kept_whatever_the_store_and_the_network_encode(mailbox: Mailbox) -> None:
    for key in ("barriers/a%2Fb/node-0", "barriers/100%25/node-0", "barriers/%C3%A4/node.0~_"):
        assert mailbox.put_if_absent(key, b"")
        assert [*mailbox.list(key.rpartition("/")[0] + "/")] == [key]
