"""RetryingMailbox: passing faults are survived, and ``put_if_absent`` never says what is not so."""

from __future__ import annotations

import io
import random

import pytest

from gradientmail_torch.errors import MailboxDenied, MailboxUnavailable, OutcomeUnknown
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Interposed, LostAnswers, Outage, Refusals, first, nth


def retrying(inner: Mailbox, clock: ManualClock | None = None, **settings: float) -> RetryingMailbox:
    return RetryingMailbox(inner, clock=clock or ManualClock(), rng=random.Random(0), **settings)


@pytest.mark.parametrize("fault", [LostAnswers, Refusals])
def test_every_operation_survives_faults_that_pass(fault: type[Refusals], mailbox: MemoryMailbox) -> None:
    struck = set()

    def once_each(operation: str, key: str) -> bool:
        fresh = (operation, key) not in struck
        struck.add((operation, key))
        return fresh

    inner = fault(mailbox, once_each)
    box = retrying(inner)
    box.put("a", b"1")
    assert box.put_if_absent("b", b"2")
    assert box.get("a") == b"1"
    assert [*box.list("")] == ["a", "b"]
    box.delete("a")
    assert [*mailbox.list("")] == ["b"]
    assert inner.fired == {"put": 1, "put_if_absent": 1, "get": 1 + (fault is LostAnswers), "list": 1, "delete": 1}


def test_it_waits_longer_each_time_and_gives_up_when_its_patience_ends(mailbox: MemoryMailbox) -> None:
    clock, outage = ManualClock(monotonic=0.0), Outage(mailbox)
    outage.down = True
    with pytest.raises(MailboxUnavailable, match="away"):
        retrying(outage, clock, patience_s=20.0, first_wait_s=0.1, longest_wait_s=5.0).get("a")
    assert 20.0 <= clock.monotonic() <= 25.0
    ceilings = [min(5.0, 0.1 * 2**number) for number in range(len(clock.sleeps))]
    assert all(0.2 * ceiling <= slept <= ceiling for slept, ceiling in zip(clock.sleeps, ceilings, strict=True))
    assert outage.fired["get"] < 30


def test_an_outage_shorter_than_its_patience_is_not_noticed(mailbox: MemoryMailbox) -> None:
    clock, outage = ManualClock(), Outage(mailbox)
    outage.down = True
    clock.at(12.0, lambda: setattr(outage, "down", False))
    assert retrying(outage, clock).put_if_absent("a", b"x")


def test_what_will_not_pass_is_not_tried_again(mailbox: MemoryMailbox) -> None:
    class Forbidden(Interposed):
        def put(self, key: str, body: object) -> None:
            raise MailboxDenied("no")

    clock = ManualClock()
    with pytest.raises(MailboxDenied):
        retrying(Forbidden(mailbox), clock).put("a", b"")
    assert clock.sleeps == []


def test_a_file_is_read_from_its_beginning_again(mailbox: MemoryMailbox) -> None:
    for fault in (LostAnswers, Refusals):
        file = io.BytesIO(b"skipped" + b"content")
        file.seek(7)
        retrying(fault(mailbox, first(2))).put("a", file)
        assert mailbox.get("a") == b"content"
        file = io.BytesIO(b"skipped" + b"content")
        file.seek(7)
        assert retrying(fault(mailbox, first(2))).put_if_absent(f"b/{fault.__name__}", file)
        assert mailbox.get(f"b/{fault.__name__}") == b"content"


def test_a_listing_goes_on_behind_the_last_key_that_it_gave(mailbox: MemoryMailbox) -> None:
    keys = [f"{number:04d}" for number in range(3500)]
    for key in keys:
        mailbox.put(key, b"")
    inner = Refusals(mailbox, nth(1, 3, 4, 6, operations=("list",)))
    assert [*retrying(inner).list("0", after="0002")] == keys[3:1000]
    assert [*retrying(inner).list("")] == keys
    assert inner.fired["list"] == 4


class TestPutIfAbsent:
    def test_a_lost_answer_to_our_own_create_counts_as_created(self, mailbox: MemoryMailbox) -> None:
        inner = LostAnswers(mailbox, first(1, "put_if_absent"))
        assert retrying(inner).put_if_absent("a", b"our nonce")
        assert inner.fired == {"put_if_absent": 1}

    def test_several_lost_answers_in_a_row_too(self, mailbox: MemoryMailbox) -> None:
        inner = LostAnswers(mailbox, first(3))  # the second says "exists" and is lost; the third is the reading back
        assert retrying(inner).put_if_absent("a", b"our nonce")

    def test_anothers_object_is_refused_after_a_lost_answer(self, mailbox: MemoryMailbox) -> None:
        mailbox.put("a", b"their nonce")
        assert not retrying(LostAnswers(mailbox, first(1, "put_if_absent"))).put_if_absent("a", b"our nonce")
        assert mailbox.get("a") == b"their nonce"

    def test_another_that_creates_it_while_we_wait_wins(self, mailbox: MemoryMailbox) -> None:
        clock = ManualClock()
        clock.at(0.01, lambda: mailbox.put_if_absent("a", b"their nonce"))
        inner = Refusals(mailbox, first(1, "put_if_absent"))
        assert not retrying(inner, clock).put_if_absent("a", b"our nonce")

    def test_an_object_that_begins_like_ours_is_not_ours(self, mailbox: MemoryMailbox) -> None:
        mailbox.put("a", b"our nonce and more")
        assert not retrying(Refusals(mailbox, first(1))).put_if_absent("a", b"our nonce")

    def test_equal_bytes_are_refused_when_no_answer_was_lost(self, mailbox: MemoryMailbox) -> None:
        mailbox.put("a", b"same")
        assert not retrying(mailbox).put_if_absent("a", b"same")

    def test_it_says_so_when_the_outcome_stays_unknown(self, mailbox: MemoryMailbox) -> None:
        inner = Refusals(LostAnswers(mailbox, first(1)), lambda operation, _: operation == "get")
        with pytest.raises(OutcomeUnknown, match="cannot tell who created 'a'"):
            retrying(inner).put_if_absent("a", b"our nonce")
        assert mailbox.get("a") == b"our nonce"
