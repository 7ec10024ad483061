"""What any mailbox can be wrapped in: retries, counting, a prefix."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import tenacity

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import MailboxUnavailable, OutcomeUnknown
from gradientmail_torch.keys import check_key
from gradientmail_torch.mailbox.base import Body, Mailbox, body_size, read_body

T = TypeVar("T")


class RetryingMailbox:
    """Retries what may pass, with exponential backoff and full jitter, for at most ``patience_s`` seconds.

    ``put_if_absent`` stays honest: a request whose answer was lost may have been carried out, so when a later
    attempt finds the object there, it is read back and compared. Objects that are created once carry a nonce,
    so equal bytes mean that it was us.
    """

    def __init__(
        self,
        inner: Mailbox,
        *,
        patience_s: float = 20.0,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.inner = inner
        self._patience_s = patience_s
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._rng = rng or random.Random()

    def __repr__(self) -> str:
        return repr(self.inner)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        return self._retry(lambda: self.inner.get(key, start=start, length=length))

    def put(self, key: str, body: Body) -> None:
        rewind = _rewinder(body)

        def attempt() -> None:
            rewind()
            self.inner.put(key, body)

        self._retry(attempt)

    def put_if_absent(self, key: str, body: Body) -> bool:
        data = read_body(body)
        ambiguous = False

        def attempt() -> bool:
            nonlocal ambiguous
            try:
                if self.inner.put_if_absent(key, data):
                    return True
            except MailboxUnavailable:
                ambiguous = True
                raise
            return ambiguous and self._is_ours(key, data)

        return self._retry(attempt)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        last = after
        listing: Iterator[str] | None = None

        def following() -> str | None:
            nonlocal listing
            try:
                if listing is None:
                    listing = self.inner.list(prefix, after=last)
                return next(listing, None)
            except MailboxUnavailable:
                listing = None  # goes on behind the last key that was seen
                raise

        while (key := self._retry(following)) is not None:
            last = key
            yield key

    def delete(self, key: str) -> None:
        self._retry(lambda: self.inner.delete(key))

    def _is_ours(self, key: str, data: bytes) -> bool:
        try:
            return self.inner.get(key, length=len(data) + 1) == data
        except MailboxUnavailable as error:
            raise OutcomeUnknown(f"cannot tell who created {key!r} in {self!r}: the answer was lost, and reading it back failed") from error

    def _retry(self, operation: Callable[[], T]) -> T:
        began = self._clock.monotonic()
        try:
            return operation()  # nearly always that is all: a listing comes here for each of its keys
        except MailboxUnavailable as error:
            failed: list[MailboxUnavailable] = [error]

        def attempt() -> T:
            if failed:
                raise failed.pop()
            return operation()

        def wait(state: tenacity.RetryCallState) -> float:
            ceiling = min(self._longest_wait_s, self._first_wait_s * 2.0 ** (state.attempt_number - 1))
            return self._rng.uniform(0.2, 1.0) * ceiling

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(MailboxUnavailable),
            stop=lambda _: self._clock.monotonic() - began >= self._patience_s,
            wait=wait,
            sleep=self._clock.sleep,
            reraise=True,
        )(attempt)


def _rewinder(body: Body) -> Callable[[], object]:
    if isinstance(body, (bytes, bytearray, memoryview)):
        return lambda: None
    position = body.tell()
    return lambda: body.seek(position)


@dataclass(slots=True)
class Usage:
    """Requests and bytes that went through a :class:`CountingMailbox`."""

    requests: dict[str, int] = field(default_factory=dict)
    """By operation: ``get``, ``put`` (conditional ones too), ``list`` (a page of 1,000 keys each), ``delete``."""
    bytes_up: int = 0
    bytes_down: int = 0


class CountingMailbox:
    """Counts requests as a store bills them: one a call, failed ones too, and one for each 1,000 keys of a listing."""

    PAGE_KEYS = 1000

    def __init__(self, inner: Mailbox) -> None:
        self.inner = inner
        self._usage = Usage()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def usage(self) -> Usage:
        """A copy of what has been counted so far."""
        with self._lock:
            return Usage(dict(self._usage.requests), self._usage.bytes_up, self._usage.bytes_down)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        self._count("get")
        found = self.inner.get(key, start=start, length=length)
        if found:
            self._count("get", requests=0, down=len(found))
        return found

    def put(self, key: str, body: Body) -> None:
        self._count("put", up=body_size(body))
        self.inner.put(key, body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        self._count("put", up=body_size(body))
        return self.inner.put_if_absent(key, body)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        self._count("list")
        for position, key in enumerate(self.inner.list(prefix, after=after)):
            if position and position % self.PAGE_KEYS == 0:
                self._count("list")
            yield key

    def delete(self, key: str) -> None:
        self._count("delete")
        self.inner.delete(key)

    def _count(self, operation: str, *, requests: int = 1, up: int = 0, down: int = 0) -> None:
        with self._lock:
            self._usage.requests[operation] = self._usage.requests.get(operation, 0) + requests
            self._usage.bytes_up += up
            self._usage.bytes_down += down


class PrefixedMailbox:
    """A part of a mailbox: keys are taken below ``prefix``."""

    def __init__(self, inner: Mailbox, prefix: str) -> None:
        self.inner = inner
        self.prefix = check_key(prefix.rstrip("/")) + "/"

    def __repr__(self) -> str:
        return f"{repr(self.inner).rstrip('/')}/{self.prefix}"

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        return self.inner.get(self.prefix + check_key(key), start=start, length=length)

    def put(self, key: str, body: Body) -> None:
        self.inner.put(self.prefix + check_key(key), body)

    def put_if_absent(self, key: str, body: Body) -> bool:
        return self.inner.put_if_absent(self.prefix + check_key(key), body)

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        start = self.prefix + after if after else ""
        for key in self.inner.list(self.prefix + prefix, after=start):
            yield key[len(self.prefix) :]

    def delete(self, key: str) -> None:
        self.inner.delete(self.prefix + check_key(key))
