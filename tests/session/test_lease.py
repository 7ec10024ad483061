"""Leases: whose ID it is, by one's own clock and successful observation alone; and beating under it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.errors import LearnerFenced, LearnerIdInUse, MailboxUnavailable
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import MAX_COUNT, Beat, Earlier, LearnerState, LifeRecord, encode, read
from gradientmail_torch.session.lease import Heartbeat, inherit, machine, process_ended, take_generation
from gradientmail_torch.session.membership import Membership, Progress
from gradientmail_torch.session.settings import Settings
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import LostAnswers, Outage, first

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
