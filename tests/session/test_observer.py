"""Who is alive, by the observer's own clock and successful observation alone."""

from __future__ import annotations

from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.mailbox import CountingMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, LearnerState, encode
from gradientmail_torch.session.observer import Observer
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import CrashBefore, Outage


def beat(mailbox: MemoryMailbox, learner_id: str, count: int, state: LearnerState = "training", generation: int = 1) -> None:
    mailbox.put(keys.beat(learner_id, generation), encode(Beat(count=count, state=state)))


class Watch:
    """An observer, with what it watches."""

    def __init__(self, mailbox: MemoryMailbox) -> None:
        self.mailbox = mailbox
        self.clock = ManualClock(monotonic=0.0)
        self.outage = Outage(mailbox)
        self.observer = Observer(self.outage, lease=30.0, clock=self.clock)
        self.count = 0

    def pass_s(self, seconds: float, *alive: str, every: float = 5.0) -> dict[str, bool]:
        """Time passes, the ``alive`` beat, and it is looked every ``every`` seconds. Who lives, by ID."""
        peers = self.observer.observe()
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.advance(every)
            self.count += 1
            for learner_id in alive:
                beat(self.mailbox, learner_id, 10 + self.count)
            peers = self.observer.observe()
        return {learner_id: peer.live for learner_id, peer in peers.items()}


@pytest.fixture
def watch(mailbox: MemoryMailbox) -> Watch:
    return Watch(mailbox)


def test_each_is_seen_as_soon_as_its_beat_is_read_though_the_next_read_hangs(watch: Watch) -> None:
    for learner_id in ("a", "b", "c"):
        beat(watch.mailbox, learner_id, 1)
    seen: list[str] = []

    def note(operation: str, key: str) -> bool:
        if key == keys.beat("c", 1):
            seen.extend(watch.observer.peers)
        return False

    watch.observer = Observer(CrashBefore(watch.mailbox, note), lease=30.0, clock=watch.clock)
    watch.observer.observe()
    assert seen == ["a", "b"]


def test_who_beats_lives_and_who_is_still_for_a_lease_is_dead(watch: Watch) -> None:
    for learner_id in ("a", "b"):
        beat(watch.mailbox, learner_id, 1)
    assert watch.pass_s(25.0, "a") == {"a": True, "b": True}
    assert watch.pass_s(10.0, "a") == {"a": True, "b": False}
    assert watch.pass_s(100.0, "a") == {"a": True, "b": False}


def test_the_dead_that_beats_again_lives_again(watch: Watch) -> None:
    beat(watch.mailbox, "a", 1)
    assert watch.pass_s(60.0) == {"a": False}
    assert watch.pass_s(60.0, "a") == {"a": True}


def test_a_first_sight_is_no_proof_of_death_whatever_the_beat_says_of_its_time(watch: Watch) -> None:
    watch.mailbox.put(keys.beat("a", 1), encode(Beat(count=1, state="training", at=-1e9)))
    assert watch.pass_s(0.0) == {"a": True}


def test_a_change_of_state_is_a_sign_of_life(watch: Watch) -> None:
    beat(watch.mailbox, "a", 1)
    watch.pass_s(25.0)
    beat(watch.mailbox, "a", 1, "leaving")
    assert watch.pass_s(25.0) == {"a": True}


def test_one_that_has_ended_is_not_among_them_and_stays_away(watch: Watch) -> None:
    for learner_id in ("a", "b"):
        beat(watch.mailbox, learner_id, 1)
    beat(watch.mailbox, "a", 2, "ended")
    assert watch.pass_s(10.0, "b") == {"b": True}
    beat(watch.mailbox, "a", 3, "training")  # a late beat of the life that has ended
    assert watch.pass_s(10.0, "b") == {"b": True}


def test_only_the_newest_life_of_an_id_counts(watch: Watch) -> None:
    beat(watch.mailbox, "a", 1)
    watch.pass_s(5.0)
    beat(watch.mailbox, "a", 1, generation=2)
    peers = watch.observer.observe()
    assert [(peer.generation, peer.live) for peer in peers.values()] == [(2, True)]


def test_after_an_outage_nobody_is_taken_for_dead_who_could_not_have_been_seen(watch: Watch) -> None:
    """Neither observer nor observed could reach the mailbox."""
    beat(watch.mailbox, "a", 1)
    watch.pass_s(20.0, "a")
    watch.outage.down = True
    for _ in range(12):
        watch.clock.advance(5.0)
        with pytest.raises(MailboxUnavailable):
            watch.observer.observe()
    watch.outage.down = False
    assert watch.pass_s(20.0) == {"a": True}
    assert watch.pass_s(15.0) == {"a": False}, "and it is not taken for alive for ever"


def test_however_long_an_observer_was_suspended_it_proves_no_more_than_one_missing_beat(watch: Watch) -> None:
    beat(watch.mailbox, "a", 1)
    watch.pass_s(5.0, "a")
    watch.clock.advance(3600.0)  # the lid was closed; the other machine's beat waits for its own wake-up
    assert watch.pass_s(20.0) == {"a": True}
    assert watch.pass_s(10.0) == {"a": False}


def test_a_mailbox_so_slow_that_every_look_is_a_gap_does_not_keep_the_dead_alive(watch: Watch) -> None:
    """Simulated training, seed 384: a learner waited for one that had died until its own time was up."""
    beat(watch.mailbox, "a", 1)
    watch.pass_s(0.0)
    assert watch.pass_s(200.0, every=26.0) == {"a": False}


def test_an_outage_in_the_middle_of_a_look_is_a_gap_as_well(watch: Watch) -> None:
    """The listing was read, then a retrying mailbox waited for the first beat."""
    for learner_id in ("a", "b"):
        beat(watch.mailbox, learner_id, 1)
    watch.pass_s(20.0, "a", "b")
    get = watch.outage.get
    stalled = False

    def stalling(key: str, **window: Any) -> bytes | None:
        nonlocal stalled
        if not stalled:
            stalled = True
            watch.clock.advance(60.0)
        return get(key, **window)

    watch.outage.get = stalling  # type: ignore[method-assign]
    assert watch.pass_s(5.0) == {"a": True, "b": True}
    assert watch.pass_s(15.0) == {"a": True, "b": True}


def test_an_observation_costs_one_listing_and_a_read_for_each_that_may_live(watch: Watch, mailbox: MemoryMailbox) -> None:
    counting = CountingMailbox(mailbox)
    observer = Observer(counting, lease=30.0, clock=watch.clock)
    for number in range(10):
        beat(mailbox, f"node-{number}", 1, "ended" if number < 4 else "training")
    observer.observe()
    before = counting.usage.requests["get"]
    observer.observe()
    assert counting.usage.requests["get"] - before == 6
    assert counting.usage.requests["list"] == 2


# --- watching very many --------------------------------------------------------------------------------

MANY = [f"node-{number:02}" for number in range(40)]


def test_of_very_many_some_are_read_at_a_time_and_all_are_taken_to_be_alive_until_then(watch: Watch, mailbox: MemoryMailbox) -> None:
    for learner_id in MANY:
        beat(mailbox, learner_id, 1)
    watch.observer = Observer(counting := CountingMailbox(mailbox), lease=30.0, clock=watch.clock)
    peers = watch.observer.observe()
    assert not watch.observer.sampled, "a turn is shorter than the lease"
    assert sorted(peers) == MANY
    assert all(peer.live and peer.beat.state == "training" for peer in peers.values())
    for _ in range(6):
        watch.observer.observe()
    assert counting.usage.requests["get"] == 7 * Observer.WATCHED
    assert counting.usage.requests["list"] == 3, "once in a turn"


def test_of_very_many_the_newcomer_is_seen_within_a_turn_and_the_dead_within_two(watch: Watch, mailbox: MemoryMailbox) -> None:
    for learner_id in MANY:
        beat(mailbox, learner_id, 1)
    living = MANY[:-1]
    watch.pass_s(30.0, *living)
    found = watch.pass_s(60.0, *living, "newcomer")
    assert found.pop("newcomer")
    assert [learner_id for learner_id, lives in found.items() if not lives] == [MANY[-1]]


def test_of_even_more_a_death_is_noticed_late(watch: Watch, mailbox: MemoryMailbox) -> None:
    for number in range(Observer.EXPECTED + 1):
        beat(mailbox, f"node-{number:02}", 1)
    watch.observer.observe()
    assert watch.observer.sampled


def test_what_beats_say_of_versions_is_kept_by_fragment(watch: Watch, mailbox: MemoryMailbox) -> None:
    for learner_id, versions in {"a": (3, 1), "b": (2, 5), "c": ()}.items():
        mailbox.put(keys.beat(learner_id, 1), encode(Beat(count=1, state="training", versions=versions)))
    watch.observer.observe()
    assert watch.observer.versions == [3, 5]
