"""``gradientmail doctor``: does this store do what a run needs, and how well.

Everything is written below a prefix of its own and removed at the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable
from uuid import uuid4

from gradientmail_torch import keys
from gradientmail_torch.cli.formats import count, dollars, duration, size
from gradientmail_torch.cli.gather import gather
from gradientmail_torch.cli.plan import Situation, recommend
from gradientmail_torch.cli.prices import PriceTable, recognize
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import GradientMailError, MailboxUnsupported
from gradientmail_torch.mailbox import Mailbox

Verdict = Literal["ok", "warning", "failed", "skipped"]

RACERS = 8
RACES = 5
LISTED = 12
TRIES = 8
LARGE_BYTES = 17 << 20
"""More than what goes up in one request."""
SLOW_LATENCY_S = 1.0
SLOW_LOSER_S = 2.0
SKEW_WARNING_S = 60.0
SKEW_LIMIT_S = 600.0
"""S3 refuses a request whose time is off by fifteen minutes."""
NEED_CONDITIONS = (
    "two learners could commit the same round. Use a store that honours 'If-None-Match: *': AWS S3, Cloudflare R2, Tigris, MinIO, "
    "SeaweedFS, or a directory"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What an examination found."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


@runtime_checkable
class KnowsTime(Protocol):
    def server_time(self) -> float | None: ...


class _Finding(Exception):
    """Ends a check with something other than ok."""

    def __init__(self, verdict: Verdict, found: str, cure: str) -> None:
        super().__init__(found)
        self.verdict: Verdict = verdict
        self.found = found
        self.cure = cure


class Doctor:
    """Examines a mailbox that has not been probed.

    Args:
        large_bytes: size of the object by which bandwidth is measured.
        parameters, nodes: of the run whose price is estimated.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        prices: PriceTable,
        large_bytes: int = LARGE_BYTES,
        parameters: float = 1e8,
        nodes: int = 4,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._mailbox = mailbox
        self._prices = prices
        self._large_bytes = large_bytes
        self._parameters = parameters
        self._nodes = nodes
        self._clock = clock
        self._nonce = uuid4().hex
        self._up_bytes_per_s = self._down_bytes_per_s = 0.0

    def examine(self) -> Iterator[Check]:
        """The checks one after the other; what rests on a failed one is skipped."""
        reached = self._check("reach and list", self._reach)
        yield reached
        clock = self._check("clock", self._compare_clocks)
        if reached.verdict == "failed":
            yield clock
            yield from self._skipped("write and read", *_RESTS_ON_WRITING, because="the store cannot be listed")
            return
        written = self._check("write and read", self._write)
        yield written
        if written.verdict == "failed":
            yield clock
            yield from self._skipped(*_RESTS_ON_WRITING, because="nothing can be written")
            return
        for name, work in zip(_RESTS_ON_WRITING, (self._create, self._race, self._list, self._large, self._latency), strict=False):
            yield self._check(name, work)
        yield clock
        yield self._check("delete", self._clean)
        yield self._check("price", self._price)

    def _check(self, name: str, work: Callable[[], str]) -> Check:
        try:
            return Check(name=name, verdict="ok", found=work())
        except _Finding as finding:
            return Check(name=name, verdict=finding.verdict, found=finding.found, cure=finding.cure)
        except GradientMailError as error:  # its text ends with the cure
            found, _, cure = str(error).partition(". ")
            return Check(name=name, verdict="failed", found=found, cure=cure)

    def _skipped(self, *names: str, because: str) -> Iterator[Check]:
        for name in names:
            yield Check(name=name, verdict="skipped", found=because)

    def _key(self, name: str) -> str:
        return keys.doctor(self._nonce, name)

    # --- the checks ------------------------------------------------------------------------------------

    def _reach(self) -> str:
        next(self._mailbox.list(keys.doctor_prefix(self._nonce)), None)
        return f"{self._mailbox!r} answers"

    def _write(self) -> str:
        key = self._key("written")
        for body in (b"first", b"second, longer", b""):
            self._mailbox.put(key, body)
            if (found := self._mailbox.get(key)) != body:
                raise _Finding("failed", f"what was just written reads as {found!r}", "The store must be strongly consistent")
        self._mailbox.put(key, b"0123456789")
        if self._mailbox.get(key, start=2, length=3) != b"234" or self._mailbox.get(self._key("absent")) is not None:
            raise _Finding("failed", "parts of objects are read wrongly", "The store must honour the Range header")
        return "what is written is read, whole and in parts, and replaced"

    def _create(self) -> str:
        key = self._key("created")
        try:
            created = self._mailbox.put_if_absent(key, b"first")
            again = self._mailbox.put_if_absent(key, b"second")
        except MailboxUnsupported as error:
            raise _Finding("failed", str(error).partition(". ")[0], f"Without conditional writes {NEED_CONDITIONS}") from error
        if not created or again or self._mailbox.get(key) != b"first":
            raise _Finding("failed", "a second create of an object was not refused", f"As it is, {NEED_CONDITIONS}")
        return "a second create is refused and changes nothing"

    def _race(self) -> str:
        slowest = 0.0
        names = [[f"race-{race}-{racer}".encode() for race in range(RACES)] for racer in range(RACERS)]

        def run(racer: int) -> list[bool]:
            nonlocal slowest
            won = []
            for race in range(RACES):
                began = self._clock.monotonic()
                won.append(self._mailbox.put_if_absent(self._key(f"race-{race}"), names[racer][race]))
                slowest = max(slowest, self._clock.monotonic() - began)
            return won

        results = gather([partial(run, racer) for racer in range(RACERS)], width=RACERS, clock=self._clock)
        for race in range(RACES):
            winners = [racer for racer in range(RACERS) if results[racer][race]]
            if len(winners) != 1 or self._mailbox.get(self._key(f"race-{race}")) != names[winners[0]][race]:
                raise _Finding("failed", f"{len(winners)} of {RACERS} threads created the same object", f"Here {NEED_CONDITIONS}")
        if slowest > SLOW_LOSER_S:
            raise _Finding(
                "warning",
                f"one of {RACERS} threads wins each of {RACES} races, and an answer took {duration(slowest)}",
                "Those who lose a race wait too long. SeaweedFS from 4.37 on does so: 4.36 does not",
            )
        return f"of {RACERS} threads one wins, in each of {RACES} races"

    def _list(self) -> str:
        names = [self._key(f"listed-{place:02d}") for place in range(LISTED)]
        gather([partial(self._mailbox.put, name, b"x") for name in names], clock=self._clock)
        prefix = self._key("listed-")
        if [*self._mailbox.list(prefix)] != names or [*self._mailbox.list(prefix, after=names[4])] != names[5:]:
            raise _Finding("failed", "a listing lacks what was just written, or is not in order", "The store must list consistently")
        gather([partial(self._mailbox.delete, name) for name in names], clock=self._clock)
        if left := [*self._mailbox.list(prefix)]:
            raise _Finding(
                "warning", f"{len(left)} deleted objects are still listed", "Such a store works; old objects are looked for in vain"
            )
        return "what is written is listed at once, in order"

    def _large(self) -> str:
        body = bytes(range(256)) * -(-self._large_bytes // 256)
        began = self._clock.monotonic()
        self._mailbox.put(self._key("large"), body)
        uploaded = self._clock.monotonic()
        same = self._mailbox.get(self._key("large"), length=len(body) + 1) == body
        ended = self._clock.monotonic()
        if not same:
            raise _Finding("failed", "a large object does not read as it was written", "Is a proxy in the way?")
        self._up_bytes_per_s = len(body) / max(1e-9, uploaded - began)
        self._down_bytes_per_s = len(body) / max(1e-9, ended - uploaded)
        return f"{size(len(body))}, in parts: {_rate(self._up_bytes_per_s)} up, {_rate(self._down_bytes_per_s)} down"

    def _latency(self) -> str:
        def median(work: Callable[[int], object]) -> float:
            times = []
            for place in range(TRIES):
                began = self._clock.monotonic()
                work(place)
                times.append(self._clock.monotonic() - began)
            return statistics.median(times)

        put = median(lambda place: self._mailbox.put(self._key(f"small-{place}"), b"x" * 500))  # a key each: R2 takes one write a second
        get = median(lambda place: self._mailbox.get(self._key(f"small-{place}")))
        listed = median(lambda place: [*self._mailbox.list(self._key("small-"))])
        found = f"put {_milliseconds(put)}, get {_milliseconds(get)}, list {_milliseconds(listed)} (medians of {TRIES})"
        if max(put, get, listed) > SLOW_LATENCY_S:
            raise _Finding("warning", found, "Rounds will be slow: choose a bucket nearer to the nodes, or a longer sync_every")
        return found

    def _compare_clocks(self) -> str:
        store = self._mailbox
        while not isinstance(store, KnowsTime) and hasattr(store, "inner"):
            store = store.inner
        if not isinstance(store, KnowsTime):
            return "this store does not look at clocks"
        began = self._clock.wall()
        theirs = store.server_time()
        if theirs is None:
            return "the store does not say the time"
        off = theirs + 0.5 - (began + self._clock.wall()) / 2  # it says whole seconds
        found = f"this machine's clock is {abs(off):.0f} s {'behind' if off > 0 else 'ahead of'} the store's"
        if abs(off) > SKEW_WARNING_S:
            verdict: Verdict = "failed" if abs(off) > SKEW_LIMIT_S else "warning"
            raise _Finding(verdict, found, "Set it, for example with 'timedatectl set-ntp true': S3 refuses requests 15 minutes off")
        return found

    def _clean(self) -> str:
        gather([partial(self._mailbox.delete, key) for key in self._mailbox.list(keys.doctor_prefix(self._nonce))], clock=self._clock)
        if left := [*self._mailbox.list(keys.doctor_prefix(self._nonce))]:
            raise _Finding(
                "failed", f"{len(left)} objects could not be deleted", f"Grant s3:DeleteObject, and delete {left[0]!r} and the like"
            )
        return "all that was written for this examination is gone"

    def _price(self) -> str:
        store = recognize(repr(self._mailbox))
        situation = Situation(
            parameters=self._parameters,
            nodes=self._nodes,
            uplink_bits_per_s=8 * self._up_bytes_per_s or 1e8,
            downlink_bits_per_s=8 * self._down_bytes_per_s or 1e8,
            seconds_per_step=1.0,
        )
        plan = recommend(situation, self._prices)
        return (
            f"{dollars(plan.dollars_per_node_hour[store])} $ a node-hour ({store}, {self._prices.date}) for {count(self._parameters)} "
            f"parameters on {self._nodes} nodes with sync_every={plan.settings.sync_every}, wire={plan.settings.wire!r} and 1 s a step"
        )


_RESTS_ON_WRITING = ("conditional create", "race", "listing", "large objects", "latency", "delete", "price")


def _rate(bytes_per_s: float) -> str:
    return f"{count(8 * bytes_per_s)}bit/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
