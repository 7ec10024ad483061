"""Leased work: claims, takeover, one outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradientmail_torch.errors import ConfigError, MailboxUnavailable, WorkFenced
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, SignedMailbox
from gradientmail_torch.patterns.heartbeat import Attentive
from gradientmail_torch.patterns.leased_work import Claim, LeasedWork, Outcome, WorkKeys
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import LostAnswers, Outage, nth

KEYS = WorkKeys("jobs/")
Party = Callable[..., LeasedWork]


@pytest.fixture
def mailbox(box: Mailbox) -> Mailbox:
    return box


@pytest.fixture
def party(mailbox: Mailbox, quiet_clock: type[ManualClock]) -> Party:
    """A party with a clock of its own and a lease of 9 s, whose heart does not beat unless it ends."""

    def make(name: str, *, box: Mailbox = mailbox, clock: ManualClock | None = None, **options: object) -> LeasedWork:
        return LeasedWork(box, KEYS, learner_id=name, lease=9.0, clock=clock or quiet_clock(), **options)  # type: ignore[arg-type]

    return make


def claimed(found: Claim | Outcome | None) -> Claim:
    assert isinstance(found, Claim)
    return found


def watch(work: LeasedWork, clock: ManualClock, seconds: float, item: str = "job", every: float = 1.0) -> Claim | Outcome | None:
    """Ask for ``item`` every second for some seconds, as a waiting party does. Returns what it is given, if anything."""
    found = work.claim(item)
    for _ in range(int(seconds / every)):
        if found is not None:
            break
        clock.advance(every)
        found = work.claim(item)
    return found


def test_one_party_gets_an_item_and_its_outcome_is_everyones(box: Mailbox, quiet_clock: type[ManualClock]) -> None:
    a, b = (LeasedWork(box, KEYS, learner_id=name, clock=quiet_clock()) for name in "ab")
    claim = claimed(a.claim("job"))
    assert claim.attempt == 1
    assert b.claim("job") is None
    assert b.outcome("job") is None
    a.finish(claim, value={"loss": 1.5})
    for work in (a, b):
        outcome = work.outcome("job")
        assert outcome is not None
        assert (outcome.status, outcome.decoded(), outcome.attempt, outcome.owner) == ("done", {"loss": 1.5}, 1, a.owner)
        work.close()


def test_a_silent_owner_is_taken_over_after_the_lease_of_the_observers_own_clock(party: Party, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock(monotonic=5.0)
    a, b = party("a"), party("b", clock=clock)
    claimed(a.claim("job"))
    assert watch(b, clock, 8.0) is None
    assert claimed(watch(b, clock, 1.0)).attempt == 2


def test_a_time_in_which_the_observer_was_away_counts_for_little(party: Party, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock()
    a, b = party("a"), party("b", clock=clock)
    claimed(a.claim("job"))
    assert watch(b, clock, 2.0) is None
    clock.advance(1000.0)
    assert watch(b, clock, 4.0) is None
    assert claimed(watch(b, clock, 1.0)).attempt == 2


def test_with_a_store_so_slow_that_every_request_is_a_gap_the_dead_are_taken_over(
    party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]
) -> None:
    class Slow(CountingMailbox):
        def get(self, key: str, **window: Any) -> bytes | None:
            clock.advance(60.0)
            return super().get(key, **window)

    clock = quiet_clock()
    a, b = party("a"), party("b", clock=clock, box=Slow(mailbox))
    claimed(a.claim("job"))
    looks = 0
    while (found := b.claim("job")) is None:
        looks += 1
        assert looks < 10
    assert claimed(found).attempt == 2
    assert looks >= Attentive.GAPS_PER_LEASE


def test_an_observer_busy_with_other_requests_was_not_away(party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    """Found by simulation: with a slow store, looks at one beat lay so far apart that nobody ever took over."""
    clock = quiet_clock()
    box = Attentive(mailbox, lease=9.0, clock=clock)
    a, b = party("a"), party("b", clock=clock, box=box)
    claimed(a.claim("job"))
    assert b.claim("job") is None
    for _ in range(4):
        clock.advance(2.5)
        box.get("another-key")
    assert claimed(b.claim("job")).attempt == 2


def test_the_lease_counts_from_the_first_look_at_a_claim(party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    """An owner that holds nothing need not beat, and may claim again after a long time."""
    clock = quiet_clock()
    box = Attentive(mailbox, lease=9.0, clock=clock)
    a, b = party("a"), party("b", clock=clock, box=box)
    first = claimed(a.claim("job"))
    assert b.claim("job") is None
    a.finish(first)
    for _ in range(100):
        clock.advance(2.5)
        box.get("another-key")
    claimed(a.claim("next"))
    assert watch(b, clock, 8.0, "next") is None
    assert claimed(watch(b, clock, 2.0, "next")).attempt == 2


def test_a_beat_puts_the_takeover_off(party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock()
    a, b = party("a"), party("b", clock=clock)
    claim = claimed(a.claim("job"))
    for beat in range(1, 10):
        mailbox.put(KEYS.beat(a.owner), b'{"count":%d,"holds":["%s"]}' % (beat, claim.nonce.encode()))
        assert watch(b, clock, 8.0) is None


def test_an_owner_that_ends_gives_its_items_up_at_once(party: Party) -> None:
    a, b = party("a"), party("b")
    claimed(a.claim("job"))
    assert b.claim("job") is None
    a.close()
    b_again = party("b")
    assert claimed(b_again.claim("job")).attempt == 2


def test_an_owner_may_take_back_what_it_gave_up(party: Party) -> None:
    a = party("a")
    a.release(claimed(a.claim("job")))
    assert claimed(a.claim("job")).attempt == 2


@pytest.mark.parametrize("later_first", [False, True])
def test_the_first_attempt_to_finish_wins_and_the_other_is_told(later_first: bool, party: Party, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock()
    a, b = party("a"), party("b", clock=clock)
    old, new = claimed(a.claim("job")), claimed(watch(b, clock, 9.0) if b.claim("job") is None else None)
    assert a.is_fenced(old)
    assert not b.is_fenced(new)
    order = [(a, old), (b, new)]
    (winner, first), (loser, second) = reversed(order) if later_first else order
    winner.finish(first, value="first")
    with pytest.raises(WorkFenced, match=f"attempt {second.attempt} at 'job' .* attempt {first.attempt} of {winner.owner} finished first"):
        loser.finish(second, value="second")
    outcome = party("c").outcome("job")
    assert outcome is not None
    assert outcome.decoded() == "first"


def test_a_party_that_asks_after_the_end_gets_the_outcome(party: Party) -> None:
    a, b = party("a"), party("b")
    claim = claimed(a.claim("job"))
    a.release(claim)
    a.finish(claimed(a.claim("job")))
    a.close()
    assert isinstance(b.claim("job"), Outcome) or b.outcome("job") is not None


def test_work_that_kills_every_process_ends(party: Party, quiet_clock: type[ManualClock]) -> None:
    claimed(party("node-1", max_attempts=3).claim("job"))
    for attempt in (2, 3):
        clock = quiet_clock()
        assert claimed(watch(party(f"node-{attempt}", clock=clock, max_attempts=3), clock, 10.0)).attempt == attempt
    clock = quiet_clock()
    outcome = watch(party("last", clock=clock, max_attempts=3), clock, 10.0)
    assert isinstance(outcome, Outcome)
    assert outcome.status == "abandoned"
    assert "3 attempts" in outcome.error
    assert "node-3" in outcome.error


@pytest.mark.parametrize("number", range(1, 8))
def test_a_lost_answer_changes_nothing(number: int, party: Party, mailbox: Mailbox) -> None:
    """With patience the operation is settled; the answer that is lost is any of claiming, finishing, looking."""
    lossy = LostAnswers(mailbox, nth(number))
    a = party("a", box=lossy, outage_timeout=5.0)
    claim = claimed(a.claim("job"))
    assert claim.attempt == 1
    a.finish(claim, value=number)
    assert [key.rpartition("/")[0] for key in mailbox.list("")] == ["jobs/claims/job", "jobs/outcomes"]
    outcome = a.outcome("job")
    assert outcome is not None
    assert outcome.decoded() == number


def test_without_patience_a_lost_claim_goes_back_and_finishing_may_be_repeated(party: Party, mailbox: Mailbox) -> None:
    a = party("a", box=LostAnswers(mailbox, nth(1, 3, operations=("put_if_absent",))))
    with pytest.raises(MailboxUnavailable):
        a.claim("job")
    claim = claimed(a.claim("other"))
    with pytest.raises(MailboxUnavailable):
        a.finish(claim, value=1)
    assert a.finish(claim, value=1).attempt == 1
    assert claimed(a.claim("job")).attempt == 2


def test_an_outage_is_not_the_owners_death(party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    clock = quiet_clock()
    away = Outage(mailbox)
    a, b = party("a"), party("b", clock=clock, box=away)
    claimed(a.claim("job"))
    assert watch(b, clock, 2.0) is None
    away.down = True
    for _ in range(20):
        clock.advance(1.0)
        with pytest.raises(MailboxUnavailable):
            b.claim("job")
    away.down = False
    assert watch(b, clock, 4.0) is None
    assert claimed(watch(b, clock, 2.0)).attempt == 2


@pytest.mark.parametrize("rubbish", [b"", b"\xff\xfe", b"[]", b'{"nonce":1}', b"{" * 5000])
def test_rubbish_in_the_mailbox_holds_nobody_up(rubbish: bytes, party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    mailbox.put(KEYS.claim("job", 1), rubbish)
    mailbox.put(KEYS.claims("job") + "what", rubbish)
    clock = quiet_clock()
    b = party("b", clock=clock)
    claim = claimed(watch(b, clock, 10.0))
    assert claim.attempt == 2
    mailbox.put(KEYS.beat(b.owner), rubbish)
    c = party("c", clock=clock)
    assert claimed(watch(c, clock, 10.0)).attempt == 3


def test_a_strangers_heartbeat_in_a_signed_run_holds_nobody_up(party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    signed, clock = SignedMailbox(mailbox, "secret of the run" * 2), quiet_clock()
    a = party("a", box=signed)
    claimed(a.claim("job"))
    mailbox.put(KEYS.beat(a.owner), b"{}")
    assert claimed(watch(party("b", box=signed, clock=clock), clock, 10.0)).attempt == 2


def test_values_that_json_cannot_hold_are_refused_before_anything_is_recorded(party: Party, mailbox: Mailbox) -> None:
    a = party("a")
    claim = claimed(a.claim("job"))
    for value in (float("nan"), {1: 2}, b"bytes", object(), {"a": [float("inf")]}, "\ud800"):
        with pytest.raises(ConfigError, match="the value of 'job'"):
            a.finish(claim, value=value)
    assert a.outcome("job") is None
    a.finish(claim, value=[None, True, 1, 1.5, "ü", {"k": ()}])


def test_many_items_of_one_owner_cost_one_look(party: Party, mailbox: Mailbox, quiet_clock: type[ManualClock]) -> None:
    a = party("a")
    items = [f"job-{number}" for number in range(50)]
    for item in items:
        claimed(a.claim(item))
    counting = CountingMailbox(mailbox)
    clock = quiet_clock()
    b = party("b", box=counting, clock=clock)
    assert {b.claim(item) for item in items} == {None}
    clock.advance(1.0)
    before = sum(counting.usage.requests.values())
    assert {b.claim(item) for item in items} == {None}
    assert sum(counting.usage.requests.values()) - before == 1


def test_a_closed_party_claims_nothing(party: Party) -> None:
    a = party("a")
    a.close()
    a.close()
    with pytest.raises(ConfigError, match="closed"):
        a.claim("job")


@pytest.mark.parametrize("options", [{"lease": 0.0}, {"lease": float("nan")}, {"max_attempts": 0}, {"learner_id": "a/b"}])
def test_settings_that_cannot_work_are_refused(options: dict[str, object], mailbox: Mailbox) -> None:
    with pytest.raises(ConfigError):
        LeasedWork(mailbox, KEYS, **{"learner_id": "a", **options})  # type: ignore[arg-type]
