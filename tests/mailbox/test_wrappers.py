"""Counting and prefixes."""

from __future__ import annotations

import io

import pytest

from gradientmail_torch.errors import InvalidName, MailboxUnavailable
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, PrefixedMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.contract import together
from gradientmail_torch.testing.faults import Outage


def test_requests_and_bytes_are_counted_as_a_store_bills_them(mailbox: MemoryMailbox) -> None:
    box = CountingMailbox(mailbox)
    box.put("a", bytes(10))
    box.put("b", memoryview(bytes(8)).cast("I"))
    box.put_if_absent("c", io.BytesIO(bytes(3)))
    box.put_if_absent("c", bytes(2))
    box.get("a", start=4)
    box.get("none")
    box.delete("a")
    assert box.usage.requests == {"put": 4, "get": 2, "delete": 1}
    assert (box.usage.bytes_up, box.usage.bytes_down) == (23, 6)


@pytest.mark.parametrize(("keys", "pages"), [(0, 1), (1, 1), (1000, 1), (1001, 2), (2500, 3)])
def test_a_listing_is_billed_by_the_thousand(mailbox: MemoryMailbox, keys: int, pages: int) -> None:
    for number in range(keys):
        mailbox.put(f"{number:04d}", b"")
    box = CountingMailbox(mailbox)
    assert len([*box.list("")]) == keys
    assert box.usage.requests == {"list": pages}


def test_failed_requests_are_billed_too(mailbox: MemoryMailbox) -> None:
    outage = Outage(mailbox)
    box = CountingMailbox(outage)
    outage.down = True
    for operation in (lambda: box.get("a"), lambda: box.put("a", b""), lambda: box.delete("a"), lambda: [*box.list("")]):
        with pytest.raises(MailboxUnavailable):
            operation()
    assert box.usage.requests == {"get": 1, "put": 1, "delete": 1, "list": 1}


def test_counting_misses_nothing_under_threads(mailbox: MemoryMailbox) -> None:
    box = CountingMailbox(mailbox)
    together(range(2000), lambda number: box.put(f"{number}", b"xy"))
    assert (box.usage.requests["put"], box.usage.bytes_up) == (2000, 4000)


def test_a_usage_is_a_copy(mailbox: MemoryMailbox) -> None:
    box = CountingMailbox(mailbox)
    before = box.usage
    box.get("a")
    assert before.requests == {}


def test_a_prefix_hides_everything_else(mailbox: MemoryMailbox) -> None:
    mailbox.put("other", b"")
    mailbox.put("run/a", b"1")
    box = PrefixedMailbox(mailbox, "run/")
    assert [*box.list("")] == ["a"]
    assert box.get("a") == b"1"
    assert box.get("other") is None
    box.put("b/c", b"2")
    assert mailbox.get("run/b/c") == b"2"
    for escape in ("../other", "", "/other"):
        with pytest.raises(InvalidName):
            box.get(escape)


def test_prefixes_nest_and_say_where_they_are(mailbox: MemoryMailbox) -> None:
    box: Mailbox = PrefixedMailbox(PrefixedMailbox(MemoryMailbox("m"), "a"), "b")
    assert repr(box) == "memory://m/a/b/"
    with pytest.raises(InvalidName):
        PrefixedMailbox(mailbox, "a//b")
