"""What can go wrong between a program and a store, as wrappers of a mailbox that chain and count what fired.

::

    box = LostAnswers(Outage(MemoryMailbox()), first(1, "put_if_absent"))

A wrapper decides by a :data:`Choice`; :func:`first`, :func:`nth` and :func:`some` make the usual ones.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.mailbox.base import Body, Mailbox, body_size

T = TypeVar("T")

Choice = Callable[[str, str], bool]
"""Whether a fault strikes the operation of this name (``get``, ``put``, ``put_if_absent``, ``list``, ``delete``) and key."""

PAGE_KEYS = 1000


class Crash(BaseException):
    """The process dies here. Not an Exception, so that nothing in the code under test survives it."""


def first(count: int, *operations: str) -> Choice:
    """The first ``count`` operations, of the kinds named if any are."""
    return nth(*range(1, count + 1), operations=operations)


def nth(*numbers: int, operations: tuple[str, ...] = ()) -> Choice:
    """The operations of these numbers, counted from 1."""
    seen = 0
    lock = threading.Lock()

    def choose(operation: str, key: str) -> bool:
        nonlocal seen
        if operations and operation not in operations:
            return False
        with lock:
            seen += 1
            return seen in numbers

    return choose


def some(share: float, rng: random.Random, *operations: str) -> Choice:
    """A random share of the operations, from 0 to 1."""
    return lambda operation, key: (not operations or operation in operations) and rng.random() < share


class Interposed:
    """A mailbox whose every request passes :meth:`_request`. Base of the faults; by itself it changes nothing.

    A listing is a request for each page of 1,000 keys, made when the page is first needed.
    """

    def __init__(self, inner: Mailbox) -> None:
        self.inner = inner
        self.fired: Counter[str] = Counter()
        """How often the fault struck, by operation."""

    def __repr__(self) -> str:
        return repr(self.inner)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        return self._request("get", key, 0, lambda: self.inner.get(key, start=start, length=length))

    def put(self, key: str, body: Body) -> None:
        self._request("put", key, body_size(body), lambda: self.inner.put(key, body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        return self._request("put_if_absent", key, body_size(body), lambda: self.inner.put_if_absent(key, body))

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        listing = self.inner.list(prefix, after=after)
        while page := self._request("list", prefix, 0, lambda: [*islice(listing, PAGE_KEYS)]):
            yield from page
            if len(page) < PAGE_KEYS:
                return

    def delete(self, key: str) -> None:
        self._request("delete", key, 0, lambda: self.inner.delete(key))

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        return carry_out()


class _Chosen(Interposed):
    def __init__(self, inner: Mailbox, choice: Choice) -> None:
        super().__init__(inner)
        self._choice = choice

    def _strikes(self, operation: str, key: str) -> bool:
        if not self._choice(operation, key):
            return False
        self.fired[operation] += 1
        return True


class LostAnswers(_Chosen):
    """The request is carried out, and the caller hears that the store did not answer."""

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        result = carry_out()
        if self._strikes(operation, key):
            raise MailboxUnavailable(f"injected: the answer to {operation} {key!r} was lost")
        return result


class Refusals(_Chosen):
    """The store says "try again" and does nothing."""

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        if self._strikes(operation, key):
            raise MailboxUnavailable(f"injected: {operation} {key!r} was refused")
        return carry_out()


class CrashBefore(_Chosen):
    """The process dies just before the request is sent."""

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        if self._strikes(operation, key):
            raise Crash(f"before {operation} {key!r}")
        return carry_out()


class CrashAfter(_Chosen):
    """The process dies just after the request was carried out."""

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        result = carry_out()
        if self._strikes(operation, key):
            raise Crash(f"after {operation} {key!r}")
        return result


class Outage(Interposed):
    """A switch: while :attr:`down`, no request gets through."""

    down = False

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        if self.down:
            self.fired[operation] += 1
            raise MailboxUnavailable(f"injected: the store is away ({operation} {key!r})")
        return carry_out()


class Slow(Interposed):
    """A distant store: each request takes ``latency_s`` and the time its bytes need at ``bytes_per_s``.

    Half of the latency passes before the request is carried out and half after.
    """

    def __init__(
        self,
        inner: Mailbox,
        *,
        latency_s: float | Callable[[], float] = 0.0,
        bytes_per_s: float = float("inf"),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(inner)
        self._latency_s = latency_s if callable(latency_s) else lambda: latency_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        half_s = self._latency_s() / 2
        self._clock.sleep(half_s + bytes_up / self._bytes_per_s)
        result = carry_out()
        bytes_down = len(result) if isinstance(result, bytes) else 0
        self._clock.sleep(half_s + bytes_down / self._bytes_per_s)
        self.fired[operation] += 1
        return result
