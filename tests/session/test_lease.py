"""Leases: whose ID it is, who is alive; by the observer's own clock and successful observation alone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.errors import LearnerFenced, LearnerIdInUse, MailboxUnavailable
from gradientmail_torch.mailbox import CountingMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import MAX_COUNT, Beat, Earlier, LearnerState, LifeRecord, encode, read
from gradientmail_torch.session.lease import Heartbeat, Observer, inherit, machine, process_ended, take_generation
from gradientmail_torch.session.membership import Membership, Progress
from gradientmail_torch.session.settings import Settings
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import CrashBefore, LostAnswers, Outage, first

SETTINGS = Settings(lease=30.0, poll_interval=1.0)
ELSEWHERE = LifeRecord(nonce="0" * 32, host="elsewhere", machine="another/1", pid=1, started_at=0.0)


def beat(mailbox: MemoryMailbox, learner_id: str, count: int, state: LearnerState = "training", generation: int = 1) -> None:
    mailbox.put(keys.beat(learner_id, generation), encode(Beat(count=count, state=state)))


def live_elsewhere(mailbox: MemoryMailbox, learner_id: str = "a", **changes: Any) -> None:
    """A life of another machine whose last beat was its third."""
    mailbox.put(keys.learner(learner_id, 1), encode(ELSEWHERE))
    beat(mailbox, learner_id, 3, **changes)


# --- taking an ID --------------------------------------------------------------------------------------


def test_the_first_life_waits_for_nothing(mailbox: MemoryMailbox) -> None:
    clock = ManualClock()
    assert take_generation(mailbox, "a", settings=SETTINGS, clock=clock) == 1
    assert clock.sleeps == []
    life = read(mailbox, LifeRecord, keys.learner("a", 1))
    assert life is not None
    assert (life.pid, life.machine) == (os.getpid(), machine())


def test_a_life_that_has_ended_is_followed_at_once(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox, state="ended")
    clock = ManualClock()
    assert take_generation(mailbox, "a", settings=SETTINGS, clock=clock) == 2
    assert clock.sleeps == []
    assert read(mailbox, LifeRecord, keys.learner("a", 1)) is not None, "who lived stays on record"


def test_the_figures_of_a_life_are_inherited_and_its_beat_goes_when_they_are_safe(mailbox: MemoryMailbox) -> None:
    """Whoever dies in between leaves them to the next one."""
    earlier = Earlier(lives=2, seconds=5.0, requests={"put": 7, "get": 1}, bytes_up=100, bytes_down=MAX_COUNT)
    live_elsewhere(mailbox, state="ended")
    last = Beat(count=4, state="ended", seconds=2.0, requests={"put": 3, "strange": 9}, bytes_up=11, bytes_down=5, earlier=earlier)
    mailbox.put(keys.beat("a", 1), encode(last))
    for generation in (2, 3):
        membership = Membership(mailbox, "a", settings=SETTINGS, clock=ManualClock(), progress=Progress)
        assert membership.life.generation == generation
        assert list(mailbox.list("beats/")) == [keys.beat("a", 1)]
    membership.beat()
    assert list(mailbox.list("beats/")) == [keys.beat("a", 3)]
    beat = read(mailbox, Beat, keys.beat("a", 3))
    assert beat is not None
    requests = {"get": 1, "put": 10, "list": 0, "delete": 0}
    assert beat.earlier == Earlier(lives=3, seconds=7.0, requests=requests, bytes_up=111, bytes_down=MAX_COUNT)


def test_a_life_that_claims_to_have_lasted_for_ever_does_not_keep_the_next_one_from_writing(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox, state="ended")
    earlier = Earlier(lives=2, seconds=1.7e308, requests={}, bytes_up=0, bytes_down=0)
    mailbox.put(keys.beat("a", 1), encode(Beat(count=4, state="ended", seconds=1.7e308, earlier=earlier)))
    Membership(mailbox, "a", settings=SETTINGS, clock=ManualClock(), progress=Progress).beat()
    beat = read(mailbox, Beat, keys.beat("a", 2))
    assert beat is not None
    assert beat.earlier is not None
    assert beat.earlier.lives == 3


def test_what_cannot_be_read_is_not_inherited(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox, state="ended")
    mailbox.put(keys.beat("a", 1), b"garbage")
    assert inherit(mailbox, keys.Life("a", 2)) == (Earlier(), (keys.beat("a", 1),))
    assert inherit(mailbox, keys.Life("a", 1)) == (Earlier(), ())


def test_after_a_crash_the_old_beat_has_to_be_still_for_a_lease_of_our_own_observation(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox)
    clock = ManualClock(monotonic=0.0)
    assert take_generation(mailbox, "a", settings=SETTINGS, clock=clock) == 2
    assert clock.monotonic() == pytest.approx(30.0, abs=1.0)


def test_a_life_that_beats_is_in_use(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox)
    clock = ManualClock(monotonic=0.0)
    clock.at(28.5, lambda: beat(mailbox, "a", 4))
    with pytest.raises(LearnerIdInUse, match="'a' is in use"):
        take_generation(mailbox, "a", settings=SETTINGS, clock=clock)
    assert read(mailbox, LifeRecord, keys.learner("a", 2)) is None, "one that is refused leaves no trace"


def test_a_life_that_ends_while_it_is_watched_is_followed_at_once(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox)
    clock = ManualClock(monotonic=0.0)
    clock.at(4.5, lambda: beat(mailbox, "a", 4, "ended"))
    assert take_generation(mailbox, "a", settings=SETTINGS, clock=clock) == 2
    assert clock.monotonic() == pytest.approx(5.0, abs=1.0)


def test_a_life_that_died_before_its_first_beat_is_waited_for_as_well(mailbox: MemoryMailbox) -> None:
    mailbox.put(keys.learner("a", 1), encode(ELSEWHERE))
    clock = ManualClock(monotonic=0.0)
    assert take_generation(mailbox, "a", settings=SETTINGS, clock=clock) == 2
    assert clock.monotonic() == pytest.approx(30.0, abs=1.0)


def test_a_life_whose_first_beat_is_still_to_come_is_in_use(mailbox: MemoryMailbox) -> None:
    mailbox.put(keys.learner("a", 1), encode(ELSEWHERE))
    clock = ManualClock(monotonic=0.0)
    clock.at(10.0, lambda: beat(mailbox, "a", 1))
    with pytest.raises(LearnerIdInUse):
        take_generation(mailbox, "a", settings=SETTINGS, clock=clock)


def test_of_two_that_take_the_id_at_once_one_is_refused(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox)
    clock = ManualClock()
    clock.at(29.0, lambda: mailbox.put_if_absent(keys.learner("a", 2), encode(ELSEWHERE)))
    with pytest.raises(LearnerIdInUse):
        take_generation(mailbox, "a", settings=SETTINGS, clock=clock)


def test_what_the_other_machines_clock_says_is_no_matter(mailbox: MemoryMailbox) -> None:
    mailbox.put(keys.learner("a", 1), encode(ELSEWHERE))
    mailbox.put(keys.beat("a", 1), encode(Beat(count=3, state="training", at=9e9)))
    clock = ManualClock(monotonic=5.0, wall=-1e9)
    clock.at(20.0, lambda: mailbox.put(keys.beat("a", 1), encode(Beat(count=4, state="training", at=-9e9))))
    with pytest.raises(LearnerIdInUse):
        take_generation(mailbox, "a", settings=SETTINGS, clock=clock)


def test_a_gap_in_our_own_reads_is_not_the_others_silence(mailbox: MemoryMailbox) -> None:
    """The mailbox was away for both of them; the other beats again soon after."""
    live_elsewhere(mailbox)
    clock = ManualClock(monotonic=0.0)

    class AwayForAMinute(Outage):
        def get(self, key: str, **window: Any) -> bytes | None:
            if key == keys.beat("a", 1) and 10 < clock.monotonic() < 60:
                clock.advance(60.0)  # as a retrying mailbox waits
            return super().get(key, **window)

    clock.at(75.0, lambda: beat(mailbox, "a", 4))
    with pytest.raises(LearnerIdInUse):
        take_generation(AwayForAMinute(mailbox), "a", settings=SETTINGS, clock=clock)


def test_a_mailbox_so_slow_that_every_read_is_a_gap_does_not_make_it_wait_for_ever(mailbox: MemoryMailbox) -> None:
    live_elsewhere(mailbox)
    clock = ManualClock(monotonic=0.0)

    class Slow(Outage):
        def get(self, key: str, **window: Any) -> bytes | None:
            clock.advance(25.0)
            return super().get(key, **window)

    assert take_generation(Slow(mailbox), "a", settings=SETTINGS, clock=clock) == 2
    assert clock.monotonic() < 300


def test_a_restart_on_the_same_machine_does_not_wait_for_a_process_that_is_gone(mailbox: MemoryMailbox) -> None:
    pid = int(subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"]))
    mailbox.put(keys.learner("a", 1), encode(LifeRecord(nonce="0" * 32, host="here", machine=machine(), pid=pid, started_at=0.0)))
    beat(mailbox, "a", 3)
    clock = ManualClock()
    assert take_generation(mailbox, "a", settings=SETTINGS, clock=clock) == 2
    assert clock.sleeps == []


def test_a_process_of_this_machine_that_is_there_is_watched_like_any_other(mailbox: MemoryMailbox) -> None:
    mailbox.put(keys.learner("a", 1), encode(LifeRecord(nonce="0" * 32, host="here", machine=machine(), pid=os.getpid(), started_at=0.0)))
    beat(mailbox, "a", 3)
    clock = ManualClock(monotonic=0.0)
    clock.at(10.0, lambda: beat(mailbox, "a", 4))
    with pytest.raises(LearnerIdInUse):
        take_generation(mailbox, "a", settings=SETTINGS, clock=clock)


def test_a_pid_of_another_machine_says_nothing(mailbox: MemoryMailbox) -> None:
    pid = int(subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"]))
    mailbox.put(keys.learner("a", 1), encode(LifeRecord(nonce="0" * 32, host="there", machine="another/1", pid=pid, started_at=0.0)))
    beat(mailbox, "a", 3)
    clock = ManualClock(monotonic=0.0)
    take_generation(mailbox, "a", settings=SETTINGS, clock=clock)
    assert clock.monotonic() > 29


def test_a_process_that_has_died_and_not_been_buried_has_ended() -> None:
    assert not process_ended(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_ended(child.pid)
    child.wait()
    assert process_ended(child.pid)


def test_a_lost_answer_to_the_birth_of_a_life_is_an_error_and_the_next_try_gets_the_next_number(mailbox: MemoryMailbox) -> None:
    box = LostAnswers(mailbox, first(1, "put_if_absent"))
    with pytest.raises(MailboxUnavailable):
        take_generation(box, "a", settings=SETTINGS, clock=ManualClock())
    assert take_generation(box, "a", settings=SETTINGS, clock=ManualClock()) == 2


# --- beating -------------------------------------------------------------------------------------------


def heartbeat(mailbox: MemoryMailbox, generation: int = 1) -> Heartbeat:
    life = keys.Life("a", generation)
    return Heartbeat(mailbox, life, interval=5.0, describe=lambda count: Beat(count=count, state="training"))


def test_every_beat_has_another_count(mailbox: MemoryMailbox) -> None:
    heart = heartbeat(mailbox)
    counts = []
    for _ in range(3):
        assert heart.tick() == 5.0
        found = read(mailbox, Beat, keys.beat("a", 1))
        assert found is not None
        counts.append(found.count)
    assert counts == [1, 2, 3]


def test_a_process_that_sees_a_newer_life_stops_before_it_beats(mailbox: MemoryMailbox) -> None:
    heart = heartbeat(mailbox)
    heart.tick()
    mailbox.put(keys.learner("a", 2), encode(ELSEWHERE))
    with pytest.raises(LearnerFenced, match=r"newer process has taken over learner_id 'a'.*suspended"):
        heart.tick()
    found = read(mailbox, Beat, keys.beat("a", 1))
    assert found is not None
    assert found.count == 1


# --- watching ------------------------------------------------------------------------------------------


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
