"""The mailbox of a simulated cluster: a store in memory behind a network that is as bad as a seed makes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Generic, Self, TypeVar, cast

from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.keys import check_key
from gradientmail_torch.mailbox.base import Body, read_body
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.kernel import Kernel
from gradientmail_torch.testing.process import Process, SimulatedThread

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How good network and machines are. Shares are of all requests, from 0 to 1; the default loses nothing."""

    latency_s: tuple[float, float] = (0.02, 0.2)
    """Shortest and longest time of an ordinary request, without the time of its bytes."""
    slow_share: float = 0.0
    slow_s: float = 20.0
    """A slow request takes up to so much longer."""
    refused_share: float = 0.0
    """Answered with "try again", and not carried out."""
    lost_share: float = 0.0
    """Carried out, and the answer lost."""
    late_share: float = 0.0
    """The answer is lost, and the request carried out up to ``late_s`` after the client gave it up."""
    late_s: float = 30.0
    down_bytes_per_s: float = float("inf")
    page_keys: int = 1000
    """Keys that one request lists."""
    jitter_s: float = 0.001
    """How late a thread is woken, at most; now and then it is a hiccup."""
    hiccup_share: float = 0.0
    hiccup_s: float = 1.0

    @classmethod
    def from_rng(cls, rng: random.Random) -> Self:
        """Anything from a quiet network to a bad one."""

        def share(worst: float) -> float:
            return rng.choice((0.0, 0.0, 0.01, worst)) * rng.random()

        shortest = rng.choice((0.001, 0.02, 0.1))
        return cls(
            latency_s=(shortest, shortest * rng.choice((1.5, 5, 20))),
            slow_share=share(0.05),
            slow_s=rng.choice((1.0, 20.0, 60.0)),
            refused_share=share(0.3),
            lost_share=share(0.3),
            late_share=share(0.05),
            page_keys=rng.choice((1, 2, 3, 10, 1000)),
            hiccup_share=share(0.05),
            hiccup_s=rng.choice((0.1, 1.0, 5.0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a simulation's log: a request that took effect or failed, or what happened to a process."""

    at_s: float
    process: str
    thread: str
    what: str
    key: str = ""
    outcome: str = ""

    def __str__(self) -> str:
        outcome = f" -> {self.outcome}" if self.outcome else ""
        return f"{self.at_s:12.4f}  {self.process:<12} {self.thread:<16} {self.what:<14} {self.key}{outcome}"


class SimulatedMailbox:
    """A mailbox for the code of all simulated processes. Outside of them it acts on the store at once.

    A request takes effect at a moment of its own between its begin and its end. Those of a process that dies
    meanwhile may still take effect if they were wholly sent; those of a process that is paused while it sends
    are sent on when it wakes.
    """

    def __init__(self, kernel: Kernel, store: MemoryMailbox, conditions: Conditions, record: Callable[[Event, bool], None]) -> None:
        self._kernel = kernel
        self._store = store
        self._conditions = conditions
        self._record = record
        self._outages: list[tuple[float, Process | None]] = []

    def __repr__(self) -> str:
        """Differs by process, as everything that a process remembers by its mailbox is its own."""
        thread = self._kernel.inside()
        return f"simulated://{thread.process if thread else ''}"

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        check_key(key)
        return self._request("get", key, lambda: self._store.get(key, start=start, length=length))

    def put(self, key: str, body: Body) -> None:
        data = read_body(body)
        check_key(key)
        self._request("put", key, lambda: self._store.put(key, data), up=len(data))

    def put_if_absent(self, key: str, body: Body) -> bool:
        data = read_body(body)
        check_key(key)
        return self._request("put_if_absent", key, lambda: self._store.put_if_absent(key, data), up=len(data))

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        while True:
            page = self._request("list", prefix, partial(self._page, prefix, after))
            yield from page
            if len(page) < self._conditions.page_keys:
                return
            after = page[-1]

    def _page(self, prefix: str, after: str) -> Sequence[str]:
        return [*islice(self._store.list(prefix, after=after), self._conditions.page_keys)]

    def delete(self, key: str) -> None:
        check_key(key)
        self._request("delete", key, lambda: self._store.delete(key))

    def outage(self, seconds: float, process: Process | None) -> None:
        """No request gets through from now on, for all or for one process. One on its way may lose its answer."""
        self._outages.append((self._kernel.now_s + seconds, process))

    def _request(self, operation: str, key: str, effect: Callable[[], T], *, up: int = 0) -> T:
        self._kernel.check_alive()
        thread = self._kernel.inside()
        if thread is None:
            return effect()
        request = _Request(self._kernel, self._conditions, thread, (operation, key), effect, self._away, self._record)
        request.begin(up)
        self._kernel.block(thread, f"{operation} {key}")
        return request.answer()

    def _away(self, process: Process) -> bool:
        if not self._outages:
            return False
        self._outages = [(end_s, whose) for end_s, whose in self._outages if end_s > self._kernel.now_s]
        return any(whose is None or whose is process for _, whose in self._outages)


class _Request(Generic[T]):
    """One request on its way: sent, carried out and answered at moments of their own, or not."""

    def __init__(
        self,
        kernel: Kernel,
        conditions: Conditions,
        thread: SimulatedThread,
        what: tuple[str, str],
        effect: Callable[[], T],
        away: Callable[[Process], bool],
        record: Callable[[Event, bool], None],
    ) -> None:
        self._kernel, self._conditions, self._thread, self._process = kernel, conditions, thread, thread.process
        self._what, self._effect, self._away, self._record = what, effect, away, record
        self._failed = ""
        self._lost = False
        self._result: T | None = None

    def begin(self, up_bytes: int) -> None:
        rng, bad = self._kernel.rng, self._conditions
        sending_s = up_bytes / self._process.up_bytes_per_s
        self._sent_at_s = self._kernel.now_s + sending_s
        latency_s = rng.uniform(*bad.latency_s)
        if rng.random() < bad.slow_share:
            latency_s += rng.random() * bad.slow_s
        whole_s, chance = sending_s + latency_s, rng.random()
        if self._away(self._process):
            self._fail("away", latency_s)
        elif chance < bad.refused_share:
            self._fail("refused", whole_s)
        elif chance < bad.refused_share + bad.late_share:
            self._fail("no answer", whole_s)
            self._kernel.act(whole_s + rng.random() * bad.late_s, self._carry_out_late)
        else:
            self._lost = chance > 1.0 - bad.lost_share
            before_s = sending_s + latency_s * rng.random()
            self._after_s = whole_s - before_s
            self._kernel.act(before_s, self._carry_out)

    def answer(self) -> T:
        """What the caller hears. Called when its thread goes on."""
        if not self._failed and (self._lost or self._away(self._process)):
            self._failed = "answer lost"
        if self._failed:
            self._note(self._failed, effect=False)
            raise MailboxUnavailable(f"simulated: {self._failed}: {self._what[0]} {self._what[1]!r}")
        return cast(T, self._result)

    def _fail(self, why: str, after_s: float) -> None:
        self._failed = why
        self._kernel.wake(self._thread, after_s)

    def _carry_out(self) -> None:
        if self._held(self._carry_out):
            return
        if self._away(self._process):
            self._fail("away", self._after_s)
            return
        self._result = self._take_effect()
        down_bytes = len(self._result) if isinstance(self._result, bytes) else 0
        self._kernel.wake(self._thread, self._after_s + down_bytes / self._conditions.down_bytes_per_s)

    def _carry_out_late(self) -> None:
        if not self._held(self._carry_out_late):
            self._take_effect(" late")

    def _held(self, again: Callable[[], None]) -> bool:
        """Whether the sender died or stood still before it had sent everything, so that nothing happens now."""
        process, now_s = self._process, self._kernel.now_s
        if not process.alive:
            return process.died_at_s < self._sent_at_s or self._kernel.rng.random() < 0.5
        if process.paused_until_s > now_s and process.paused_at_s < self._sent_at_s:
            self._sent_at_s += process.paused_until_s - process.paused_at_s
            self._kernel.act(process.paused_until_s - process.paused_at_s, again)
            return True
        return False

    def _take_effect(self, how: str = "") -> T:
        result = self._effect()
        self._note(_outcome(self._what[0], result) + how, effect=True)
        return result

    def _note(self, outcome: str, *, effect: bool) -> None:
        operation, key = self._what
        event = Event(
            at_s=self._kernel.now_s, process=str(self._process), thread=self._thread.name, what=operation, key=key, outcome=outcome
        )
        self._record(event, effect)


def _outcome(operation: str, result: object) -> str:
    match result:
        case bool():
            return "created" if result else "exists"
        case bytes():
            return f"{len(result)} B"
        case [*page]:
            return f"{len(page)} keys"
        case _:
            return "absent" if operation == "get" else "done"
