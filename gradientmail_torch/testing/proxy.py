"""A proxy in front of an S3 server that loses answers, refuses, hangs up, slows down and goes away.

For what a wrapper of the mailbox cannot reach: the S3 client's own handling of a bad network, in this process
or in others. It reads each request whole, so it is for tests and not for speed.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from gradientmail_torch.clock import SYSTEM_CLOCK

_HOP_HEADERS = {"connection", "expect", "keep-alive", "transfer-encoding"}


class Fault(Enum):
    LOSE_ANSWER = auto()
    """Carried out; the connection ends before the answer."""
    CUT_ANSWER = auto()
    """Carried out; the connection ends in the middle of the answer's body."""
    HANG_UP = auto()
    """Not carried out; the connection ends."""
    REFUSE = auto()
    """Not carried out; the answer is 503 SlowDown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    method: str
    path: str
    conditional: bool
    """Whether it carries If-None-Match."""


class FaultProxy:
    """Forwards to ``host:port`` from :attr:`port` of loopback. Use as a context manager.

    Set :attr:`fault` to choose what strikes a request, :attr:`down` for an outage, :attr:`bytes_per_s` to limit
    each transfer, :attr:`answered` to watch; all may change at any time.
    """

    def __init__(self, host: str, port: int) -> None:
        self.upstream = (host, port)
        self.fault: Callable[[Request], Fault | None] = lambda request: None
        self.answered: Callable[[Request, int], object] = lambda request, status: None
        """Told of each request that the server has answered, with the status; also where the answer is lost then."""
        self.down = False
        self.bytes_per_s = float("inf")
        self.fired: Counter[Fault] = Counter()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="fault-proxy", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def choose(self, request: Request) -> Fault | None:
        chosen = Fault.HANG_UP if self.down else self.fault(request)
        if chosen:
            self.fired[chosen] += 1
        return chosen


class _Server(ThreadingHTTPServer):
    """Closes with its connections, which clients would keep open, and joins the threads that served them."""

    daemon_threads = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(address, handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._open.add(request)
        super().process_request(request, client_address)

    def close_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        assert isinstance(request, socket.socket)
        self._open.discard(request)
        super().close_request(request)

    def server_close(self) -> None:
        for connection in [*self._open]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:  # the client gave up
                self.close_connection = True
                return
            conditional = self.headers.get("If-None-Match") is not None
            request = Request(method=self.command, path=self.path, conditional=conditional)
            fault = proxy.choose(request)
            if fault is Fault.HANG_UP:
                self.close_connection = True
                return
            if fault is Fault.REFUSE:
                self._answer(503, {"Content-Type": "application/xml"}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
                return
            _take_time(len(body))
            try:
                status, headers, answer = self._carry_out(body)
            except OSError:  # the server behind is away
                self.close_connection = True
                return
            proxy.answered(request, status)
            _take_time(len(answer))
            if fault is Fault.LOSE_ANSWER:
                self.close_connection = True
            else:
                self._answer(status, headers, answer, whole=fault is not Fault.CUT_ANSWER)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815

        def _carry_out(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
            # The Host header goes on as it came: it is part of the client's signature.
            connection = http.client.HTTPConnection(*proxy.upstream, timeout=60)
            try:
                headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_HEADERS}
                connection.request(self.command, self.path, body or None, headers)
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            finally:
                connection.close()

        def _answer(self, status: int, headers: dict[str, str], body: bytes, *, whole: bool = True) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                if name.lower() not in _HOP_HEADERS | {"content-length"}:
                    self.send_header(name, value)
            length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(body if whole else body[: len(body) // 2])
            self.close_connection = self.close_connection or not whole

        def log_message(self, format: str, *args: object) -> None:
            pass

    def _take_time(count: int) -> None:
        if count and proxy.bytes_per_s != float("inf"):
            SYSTEM_CLOCK.sleep(count / proxy.bytes_per_s)

    return Handler
