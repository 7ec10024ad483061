"""open_mailbox: what a URL opens, and what is said about one that opens nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gradientmail_torch.errors import ConfigError, MailboxDenied, MailboxMissing, MailboxUnsupported
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.s3_server import S3Server


def test_each_form_of_url_opens_an_empty_mailbox(mailbox_url: str) -> None:
    box = open_mailbox(mailbox_url)
    assert [*box.list("")] == []
    assert box.put_if_absent("a", b"x")
    assert open_mailbox(mailbox_url).get("a") == b"x"


def test_a_plain_path_is_a_directory_and_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    open_mailbox("runs/first").put("a", b"x")
    assert (tmp_path / "runs/first/a").read_bytes() == b"x"
    assert open_mailbox(Path("runs/first")).get("a") == b"x"
    assert open_mailbox(f"file://{tmp_path}/runs/first").get("a") == b"x"
    assert open_mailbox(f"file://localhost{tmp_path}/runs/first").get("a") == b"x"


def test_who_only_reads_makes_no_directory(tmp_path: Path) -> None:
    box = open_mailbox(tmp_path / "run", probed=False)
    assert [*box.list("")] == []
    assert box.get("a") is None
    assert not (tmp_path / "run").exists()
    box.put("a", b"x")
    assert box.get("a") == b"x"


def test_escapes_in_a_file_url_are_resolved(tmp_path: Path) -> None:
    folder = tmp_path / "with blank"
    open_mailbox(folder.as_uri()).put("a", b"x")
    assert (folder / "a").exists()


def test_a_mailbox_is_returned_as_it_is(mailbox: MemoryMailbox) -> None:
    assert open_mailbox(mailbox) is mailbox


def test_prefixes_of_a_bucket_are_apart(s3_url: str) -> None:
    first, second = open_mailbox(s3_url), open_mailbox(s3_url.replace("?", "-b?"))
    first.put("a", b"x")
    assert [*second.list("")] == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "is empty"),
        ("gs://bucket/run", "unknown scheme 'gs'"),
        ("s3:/bucket/run", "lacks a slash"),
        ("s3:bucket/run", "lacks a slash"),
        (Path("s3://bucket/run"), "a URL is no Path"),
        (Path("file:///tmp/run"), "lacks a slash"),
        ("https://bucket.s3.amazonaws.com/run", "unknown scheme 'https'"),
        ("file://host/run", "three slashes"),
        ("file://", "three slashes"),
        ("s3:///run", "no bucket"),
        ("s3://bucket/run?endpoint=http://localhost", "unknown parameter 'endpoint'"),
        ("s3://bucket/run//b", "mailbox key 'run//b'"),
        ("s3://bucket/../run", "mailbox key"),
        ("s3://key:secret@bucket/run", "no credentials"),
        ("s3://key:secret@/run", "no credentials"),
        ("s3://bucket/run?endpoint_url=https://key:secret@host", "no credentials"),
        ("ftp://key:secret@host/run", "no credentials"),
        (17, "not int"),
        (None, "not NoneType"),
    ],
)
def test_a_wrong_url_is_named_with_what_can_be_given(url: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_mailbox(url)  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


@pytest.mark.s3
class TestS3:
    def test_a_missing_bucket_is_named(self, s3_url: str) -> None:
        with pytest.raises(MailboxMissing, match=r"s3://nowhere/.*Create the bucket"):
            open_mailbox(s3_url.replace("gradientmail", "nowhere"))

    def test_missing_rights_are_named(self, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in s3_server.reader_env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(MailboxDenied, match="PutObject, DeleteObject and ListBucket"):
            open_mailbox(s3_url)

    def test_a_wrong_secret_is_named_and_not_shown(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
        with pytest.raises(MailboxDenied, match="Check the credentials") as caught:
            open_mailbox(s3_url)
        assert "mistyped" not in str(caught.value)

    def test_missing_credentials_are_named(self, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        with pytest.raises(MailboxDenied, match="set AWS_ACCESS_KEY_ID"):
            open_mailbox(s3_url)

    def test_a_bucket_name_that_cannot_be_is_named(self, s3_url: str) -> None:
        with pytest.raises(ConfigError, match="bucket 'no_such bucket'"):
            open_mailbox(s3_url.replace("gradientmail", "no_such bucket"))

    def test_the_probe_leaves_nothing(self, s3_url: str) -> None:
        assert [*open_mailbox(s3_url).list("")] == []


class FakeStore(BaseHTTPRequestHandler):
    """As little of S3 as opening needs. It ignores If-None-Match, as some stores do."""

    def _answer(self, status: int = 200, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.server.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))  # type: ignore[attr-defined]
        self._answer()

    def do_GET(self) -> None:
        listing = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        self._answer(body=listing if "list-type" in self.path else self.server.objects[self.path])  # type: ignore[attr-defined]

    def do_DELETE(self) -> None:
        self._answer(204)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), handler)
    server.objects = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


@pytest.mark.usefixtures("_credentials")
class TestOddStores:
    def test_a_store_that_ignores_conditional_writes_is_refused(self) -> None:
        with served(FakeStore) as url, pytest.raises(MailboxUnsupported, match="ignores 'If-None-Match"):
            open_mailbox(url)

    def test_a_store_without_conditional_writes_is_refused(self) -> None:
        class Backblaze(FakeStore):
            def do_PUT(self) -> None:
                self._answer(501, b"<Error><Code>NotImplemented</Code><Message>header</Message></Error>")

        with served(Backblaze) as url, pytest.raises(MailboxUnsupported, match="with conditional writes"):
            open_mailbox(url)

    @pytest.mark.parametrize(
        ("status", "code"),
        [(301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed"), (400, "IllegalLocationConstraintException")],
    )
    def test_a_wrong_region_is_named_with_its_cure(self, status: int, code: str) -> None:
        class Elsewhere(FakeStore):
            def do_PUT(self) -> None:
                self._answer(status, f"<Error><Code>{code}</Code><Message>m</Message><Region>eu-west-1</Region></Error>".encode())

            def do_HEAD(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

        with served(Elsewhere) as url, pytest.raises(MailboxDenied, match=r"another region: add \?region="):
            open_mailbox(url)

    def test_a_clock_that_is_off_is_named(self) -> None:
        class Strict(FakeStore):
            def do_PUT(self) -> None:
                self._answer(403, b"<Error><Code>RequestTimeTooSkewed</Code><Message>m</Message></Error>")

        with served(Strict) as url, pytest.raises(MailboxDenied, match="Set this machine's clock"):
            open_mailbox(url)


def test_the_contract_of_a_mailbox_is_its_protocol(mailbox: MemoryMailbox) -> None:
    assert isinstance(mailbox, Mailbox)
    assert not isinstance({}, Mailbox)
