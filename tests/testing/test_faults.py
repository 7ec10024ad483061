"""The fault wrappers: what each does to a request, and that it counts."""

from __future__ import annotations

import random

import pytest

from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.contract import MailboxContract
from gradientmail_torch.testing.faults import (
    Crash,
    CrashAfter,
    CrashBefore,
    Interposed,
    LostAnswers,
    Outage,
    Refusals,
    Slow,
    first,
    nth,
    some,
)


class TestInterposed(MailboxContract):
    @pytest.fixture
    def mailbox(self) -> Mailbox:
        return Interposed(MemoryMailbox())


def test_a_lost_answer_leaves_the_object_there(mailbox: MemoryMailbox) -> None:
    box = LostAnswers(mailbox, first(1, "put_if_absent"))
    with pytest.raises(MailboxUnavailable, match="lost"):
        box.put_if_absent("a", b"x")
    assert mailbox.get("a") == b"x"
    assert not box.put_if_absent("a", b"y")
    assert box.fired == {"put_if_absent": 1}


def test_a_refusal_leaves_nothing(mailbox: MemoryMailbox) -> None:
    box = Refusals(mailbox, first(1))
    with pytest.raises(MailboxUnavailable, match="refused"):
        box.put("a", b"x")
    assert mailbox.get("a") is None
    box.put("a", b"x")
    assert box.fired == {"put": 1}


@pytest.mark.parametrize(("crash", "left"), [(CrashBefore, None), (CrashAfter, b"2")])
def test_a_crash_strikes_beside_the_operation_of_its_number(mailbox: MemoryMailbox, crash: type[CrashBefore], left: bytes | None) -> None:
    box = crash(mailbox, nth(2))
    box.put("1", b"1")
    with pytest.raises(Crash, match="put '2'"):
        box.put("2", b"2")
    assert mailbox.get("2") == left
    assert box.fired == {"put": 1}


def test_an_outage_ends_when_it_is_switched_off(mailbox: MemoryMailbox) -> None:
    box = Outage(mailbox)
    box.down = True
    for operation in (lambda: box.get("a"), lambda: [*box.list("")], lambda: box.delete("a")):
        with pytest.raises(MailboxUnavailable):
            operation()
    box.down = False
    assert box.get("a") is None
    assert box.fired == {"get": 1, "list": 1, "delete": 1}


def test_a_slow_store_takes_its_latency_and_the_time_of_the_bytes(mailbox: MemoryMailbox) -> None:
    clock = ManualClock(monotonic=0.0)
    box = Slow(mailbox, latency_s=0.5, bytes_per_s=100, clock=clock)
    box.put("a", bytes(200))
    assert clock.monotonic() == 2.5
    box.get("a")
    assert clock.monotonic() == 5.0


def test_a_listing_is_a_request_for_each_page(mailbox: MemoryMailbox) -> None:
    keys = [f"{number:04d}" for number in range(2500)]
    for key in keys:
        mailbox.put(key, b"")
    box = Refusals(mailbox, nth(3, operations=("list",)))
    listing = box.list("")
    assert [next(listing) for _ in range(2000)] == keys[:2000]
    with pytest.raises(MailboxUnavailable):
        next(listing)


def test_wrappers_chain_and_a_random_share_comes_from_its_seed(mailbox: MemoryMailbox) -> None:
    def struck(seed: int) -> list[int]:
        box = Refusals(Outage(mailbox), some(0.3, random.Random(seed), "get"))
        found = []
        for number in range(100):
            box.put("a", b"")
            try:
                box.get("a")
            except MailboxUnavailable:
                found.append(number)
        return found

    assert struck(1) == struck(1) != struck(2)
    assert 10 < len(struck(1)) < 50
