"""gradientmail doctor: right and wrong stores are told apart, and nothing is left behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from gradientmail_torch.cli.doctor import Check, Doctor
from gradientmail_torch.cli.prices import load
from gradientmail_torch.clock import SYSTEM_CLOCK, Task
from gradientmail_torch.errors import MailboxDenied
from gradientmail_torch.mailbox import Body, Mailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Interposed, Slow
from gradientmail_torch.testing.s3_server import S3Server
from tests.cli.conftest import Command


class FastClock(ManualClock):
    """Time that passes at once, for threads that do not wait for each other."""

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        return SYSTEM_CLOCK.spawn(target, name=name)


def examined(mailbox: Mailbox, **options: object) -> dict[str, Check]:
    doctor = Doctor(mailbox, prices=load(), **{"large_bytes": 100_000, **options})  # type: ignore[arg-type]
    return {check.name: check for check in doctor.examine()}


def verdicts(command: Command, url: str, *, fails: bool) -> dict[str, dict[str, str]]:
    result = command("doctor", url, "--json", fails=fails)
    return {check["name"]: check for check in json.loads(result.stdout)}


ALL = {"reach and list", "write and read", "conditional create", "race", "listing", "large objects", "latency", "clock", "delete", "price"}


def test_a_good_store_passes_every_check_and_is_left_as_it_was(command: Command, mailbox_url: str) -> None:
    open_mailbox(mailbox_url).put("mine", b"x")
    found = verdicts(command, mailbox_url, fails=False)
    assert found.keys() == ALL
    assert {name: check["verdict"] for name, check in found.items()} == dict.fromkeys(ALL, "ok")
    assert [*open_mailbox(mailbox_url).list("")] == ["mine"]


def test_it_reads_well_in_a_terminal(command: Command, tmp_path: Path) -> None:
    text = command("doctor", str(tmp_path / "mailbox"), "--megabytes", "1").stdout
    assert "✓ race: of 8 threads one wins" in text
    assert "a node-hour" in text


@pytest.mark.s3
class TestS3:
    def test_a_right_to_read_alone_fails_at_the_first_write_with_the_rights_that_are_needed(
        self, command: Command, s3_url: str, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in s3_server.reader_env.items():
            monkeypatch.setenv(name, value)
        found = verdicts(command, s3_url, fails=True)
        assert found["reach and list"]["verdict"] == "ok"
        assert found["write and read"]["verdict"] == "failed"
        assert "AccessDenied" in found["write and read"]["found"]
        assert "PutObject" in found["write and read"]["cure"]
        assert found["race"] == {"name": "race", "verdict": "skipped", "found": "nothing can be written", "cure": ""}

    def test_wrong_credentials_fail_at_the_door(self, command: Command, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mistyped")
        found = verdicts(command, s3_url, fails=True)
        assert found["reach and list"]["verdict"] == "failed"
        assert "Check the credentials" in found["reach and list"]["cure"]
        assert found["write and read"]["verdict"] == "skipped"

    def test_a_missing_bucket_is_named_with_its_cure(self, command: Command, s3_url: str) -> None:
        found = verdicts(command, s3_url.replace("gradientmail", "nowhere"), fails=True)
        assert "Create the bucket" in found["reach and list"]["cure"]

    def test_the_stores_clock_is_read_from_its_answers(self, command: Command, s3_url: str) -> None:
        assert "clock is" in verdicts(command, s3_url, fails=False)["clock"]["found"]


class PlainStore(BaseHTTPRequestHandler):
    """As much of S3 as the doctor needs, but for ``If-None-Match``, which it ignores as some stores do."""

    protocol_version = "HTTP/1.1"  # below that a client waits a second before it sends a body
    objects: dict[str, bytes]

    def _answer(self, status: int = 200, body: bytes = b"", **headers: str) -> None:
        self.close_connection = True
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "ETag": '"e"', "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/bucket/")

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        part = f"#{int(asked['partNumber'][0]):05d}" if "partNumber" in asked else ""
        self.objects[self._key() + part] = self._body()
        self._answer()

    def do_POST(self) -> None:
        self._body()
        if "uploads" in parse_qs(urlsplit(self.path).query, keep_blank_values=True):
            self._answer(body=b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            return
        parts = sorted(key for key in self.objects if key.startswith(self._key() + "#"))
        self.objects[self._key()] = b"".join(self.objects.pop(part) for part in parts)
        self._answer(body=b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        if "list-type" in asked:
            prefix, after = asked.get("prefix", [""])[0], asked.get("start-after", [""])[0]
            found = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
            entries = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in found)
            self._answer(body=f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode())
        elif (data := self.objects.get(self._key())) is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        elif window := self.headers.get("Range"):
            begin, _, end = window.removeprefix("bytes=").partition("-")
            part = data[int(begin) : int(end) + 1 if end else None]
            extent = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}"
            self._answer(206 if part else 416, part or b"<Error><Code>InvalidRange</Code></Error>", **{"Content-Range": extent})
        else:
            self._answer(body=data)

    def do_DELETE(self) -> None:
        self.objects.pop(self._key(), None)
        self._answer(204)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    store = type("Store", (handler,), {"objects": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), store)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"s3://bucket/run?endpoint_url=http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class TestStoresThatWillNotDo:
    def test_one_that_ignores_conditions_fails_at_create_and_race_with_the_cure(
        self, command: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with served(PlainStore, monkeypatch) as url:
            found = verdicts(command, url, fails=True)
        assert {name: check["verdict"] for name, check in found.items()} == {
            **dict.fromkeys(ALL, "ok"),
            "conditional create": "failed",
            "race": "failed",
        }
        assert "not refused" in found["conditional create"]["found"]
        assert "Cloudflare R2" in found["conditional create"]["cure"]
        assert "8 of 8 threads created the same object" in found["race"]["found"]

    def test_one_that_refuses_conditions_fails_with_the_cure(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        class Refuses(PlainStore):
            def do_PUT(self) -> None:
                if self.headers.get("If-None-Match"):
                    self._body()
                    self._answer(501, b"<Error><Code>NotImplemented</Code><Message>header</Message></Error>")
                else:
                    super().do_PUT()

        with served(Refuses, monkeypatch) as url:
            found = verdicts(command, url, fails=True)
        assert "NotImplemented" in found["conditional create"]["found"]
        assert "AWS S3" in found["conditional create"]["cure"]

    def test_a_clock_that_is_off_fails_with_the_cure(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        class Late(PlainStore):
            def date_time_string(self, timestamp: float | None = None) -> str:
                return "Mon, 30 Nov 2020 12:00:00 GMT"

        with served(Late, monkeypatch) as url:
            clock = verdicts(command, url, fails=True)["clock"]
        assert "ahead of the store's" in clock["found"]
        assert "set-ntp" in clock["cure"]

    def test_a_distant_one_is_a_warning_and_no_failure(self) -> None:
        clock = FastClock()
        found = examined(Slow(MemoryMailbox(), latency_s=1.5, bytes_per_s=1e5, clock=clock), clock=clock, large_bytes=10**8)
        assert found["latency"].verdict == "warning"
        assert "nearer" in found["latency"].cure
        assert "799 kbit/s" in found["large objects"].found

    def test_one_whose_losers_wait_is_a_warning(self) -> None:
        clock = FastClock()

        class SlowLosers(MemoryMailbox):
            def put_if_absent(self, key: str, body: Body) -> bool:
                won = super().put_if_absent(key, body)
                if not won:
                    clock.advance(5.0)
                return won

        race = examined(SlowLosers(), clock=clock)["race"]
        assert race.verdict == "warning"
        assert "4.36" in race.cure

    def test_no_right_to_delete_fails_with_the_cure(self) -> None:
        class NoDelete(Interposed):
            def delete(self, key: str) -> None:
                raise MailboxDenied("cannot delete: 403. They need DeleteObject")

        found = examined(NoDelete(MemoryMailbox()))
        assert found["delete"].verdict == "failed"
        assert "DeleteObject" in found["delete"].cure

    def test_one_that_alters_what_is_large_fails(self) -> None:
        class Truncates(MemoryMailbox):
            def put(self, key: str, body: Body) -> None:
                super().put(key, bytes(body)[:50_000])  # type: ignore[arg-type]

        assert examined(Truncates())["large objects"].verdict == "failed"
