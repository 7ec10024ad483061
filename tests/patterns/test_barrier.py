"""The Barrier, sentence by sentence of its document."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from gradientmail_torch import keys
from gradientmail_torch.errors import ConfigError, InvalidName, MailboxUnavailable, RunTimeout
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, PrefixedMailbox, RetryingMailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.presence import is_waiting
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.contract import together
from gradientmail_torch.testing.faults import LostAnswers, Outage, Refusals, first


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(monotonic=0.0)


def arrives(mailbox: Mailbox, learner_id: str, name: str = "start") -> Callable[[], object]:
    return lambda: mailbox.put_if_absent(f"barriers/{name}/{learner_id}", b"")


class TestLiningUp:
    def test_it_opens_when_the_last_of_three_arrives(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        clock.at(10, arrives(mailbox, "B"))
        clock.at(25, arrives(mailbox, "C"))
        assert Barrier(mailbox=mailbox, learner_id="A", clock=clock).wait("start", parties=3) == ["A", "B", "C"]
        assert clock.monotonic() == 25

    def test_the_last_one_passes_at_once(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        arrives(mailbox, "A")()
        arrives(mailbox, "B")()
        assert Barrier(mailbox, "C", clock=clock).wait("start", parties=3) == ["A", "B", "C"]
        assert clock.sleeps == []

    @pytest.mark.parametrize("poll_interval", [0.25, 1.0, 7.0])
    def test_the_others_pass_within_one_poll_interval_of_the_last_arrival(
        self, mailbox: MemoryMailbox, clock: ManualClock, poll_interval: float
    ) -> None:
        clock.at(30.1, arrives(mailbox, "B"))
        Barrier(mailbox, "A", poll_interval=poll_interval, clock=clock).wait("start", parties=2)
        assert 30.1 <= clock.monotonic() <= 30.1 + poll_interval

    def test_one_that_comes_after_it_opened_passes_at_once(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        for learner_id in "ABC":
            arrives(mailbox, learner_id)()
        assert Barrier(mailbox, "D", clock=clock).wait("start", parties=3) == ["A", "B", "C", "D"]
        assert clock.sleeps == []

    def test_a_single_party_never_waits(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        assert Barrier(mailbox, "A", clock=clock).wait("start", parties=1) == ["A"]
        assert clock.sleeps == []

    def test_three_nodes_line_up_on_each_backend(self, mailbox_url: str) -> None:
        def node(learner_id: str) -> list[list[str]]:
            barrier = Barrier(mailbox=mailbox_url, learner_id=learner_id, poll_interval=0.02)
            return [barrier.wait(f"epoch-{epoch}", parties=3, timeout=60) for epoch in range(3)]

        assert together(["node-0", "node-1", "node-2"], node) == [[["node-0", "node-1", "node-2"]] * 3] * 3
        assert len([*open_mailbox(mailbox_url).list("barriers/")]) == 9


class TestSayingWhoIsMissing:
    def test_a_wait_is_told_of_after_half_a_minute_and_then_ever_more_seldom(
        self, mailbox: MemoryMailbox, clock: ManualClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Loud enough to be seen without any logging set up, and by name as far as the run knows names."""
        for learner_id in ("A", "B", "C"):
            mailbox.put(keys.learner(learner_id, 1), b"")
        mailbox.put("learners/.DS_Store", b"")
        clock.at(40, arrives(mailbox, "B"))
        clock.at(250, arrives(mailbox, "C"))
        Barrier(mailbox, "A", clock=clock).wait("start", parties=3)
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
            "barrier 'start': 1 of 3 arrived after 30 s (A); of the run's learners not here: B, C",
            "barrier 'start': 2 of 3 arrived after 60 s (A, B); of the run's learners not here: C",
            "barrier 'start': 2 of 3 arrived after 120 s (A, B); of the run's learners not here: C",
            "barrier 'start': 2 of 3 arrived after 240 s (A, B); of the run's learners not here: C",
        ]

    def test_a_time_out_names_them_too(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        with pytest.raises(RunTimeout, match="no other learner is known here"):
            Barrier(mailbox, "A", clock=clock).wait("start", parties=2, timeout=5)
        mailbox.put(keys.learner("B", 1), b"")
        with pytest.raises(RunTimeout, match="not here: B"):
            Barrier(mailbox, "A", clock=clock).wait("start", parties=2, timeout=5)


class TestRecordingArrivals:
    def test_an_arrival_that_somebody_has_removed_is_recorded_again(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        clock.at(5, lambda: mailbox.delete("barriers/start/A"))
        clock.at(10, arrives(mailbox, "B"))
        assert Barrier(mailbox, "A", clock=clock).wait("start", parties=2) == ["A", "B"]
        assert mailbox.get("barriers/start/A") == b"2"

    def test_an_arrival_is_an_object_that_is_created_once_and_stays(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        box = CountingMailbox(mailbox)
        barrier = Barrier(box, "node-0", clock=clock)
        barrier.wait("start", parties=1)
        barrier.wait("start", parties=1)
        assert [*mailbox.list("")] == ["barriers/start/node-0"]
        assert mailbox.get("barriers/start/node-0") == b"1"
        assert "delete" not in box.usage.requests

    def test_each_poll_is_one_listing(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        box = CountingMailbox(mailbox)
        clock.at(4.5, arrives(mailbox, "B"))
        Barrier(box, "A", poll_interval=1, clock=clock).wait("start", parties=2)
        assert box.usage.requests == {"put": 1, "list": 6}

    def test_a_restarted_node_finds_its_arrival_and_counts_once(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        with pytest.raises(RunTimeout):
            Barrier(mailbox, "A", clock=clock).wait("start", parties=2, timeout=5)
        with pytest.raises(RunTimeout, match="1 of 2 learners arrived within 5 s \\(A\\)"):
            Barrier(mailbox, "A", clock=clock).wait("start", parties=2, timeout=5)
        arrives(mailbox, "B")()
        before = clock.monotonic()
        assert Barrier(mailbox, "A", clock=clock).wait("start", parties=2) == ["A", "B"]
        assert clock.monotonic() == before

    def test_names_are_barriers_of_their_own(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        barrier = Barrier(mailbox, "A", clock=clock)
        barrier.wait("epoch-1", parties=1)
        with pytest.raises(RunTimeout):
            barrier.wait("epoch-10", parties=2, timeout=1)
        with pytest.raises(RunTimeout):
            Barrier(PrefixedMailbox(mailbox, "new-run"), "B", clock=clock).wait("epoch-1", parties=2, timeout=1)

    @pytest.mark.parametrize("name", ["a/b", "..", "after epoch 3", "épreuve", "100%"])
    def test_any_text_names_a_barrier(self, mailbox: MemoryMailbox, clock: ManualClock, name: str) -> None:
        barrier = Barrier(mailbox, "A", clock=clock)
        barrier.wait(name, parties=1)
        assert Barrier(mailbox, "B", clock=clock).wait(name, parties=2) == ["A", "B"]
        with pytest.raises(RunTimeout):
            barrier.wait(name + "x", parties=2, timeout=1)

    def test_what_a_file_manager_leaves_is_no_arrival(self, tmp_path: Path, clock: ManualClock) -> None:
        box = open_mailbox(tmp_path)
        box.put("barriers/start/.DS_Store", b"")
        box.put("barriers/start/folder/B", b"")
        with pytest.raises(RunTimeout, match="1 of 2"):
            Barrier(box, "A", clock=clock).wait("start", parties=2, timeout=3)

    def test_more_parties_than_a_page_of_a_listing(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        ids = [f"node-{number:04d}" for number in range(1199)]
        for number, learner_id in enumerate(ids):
            clock.at(number / 100, arrives(mailbox, learner_id))
        assert Barrier(mailbox, "node-1199", clock=clock).wait("start", parties=1200) == [*ids, "node-1199"]
        assert clock.monotonic() == 12


@pytest.mark.s3
def test_more_parties_than_a_page_of_a_listing_on_s3(s3_url: str) -> None:
    box = open_mailbox(s3_url)
    ids = [f"node-{number:04d}" for number in range(1200)]
    together(ids[:-1], lambda learner_id: arrives(box, learner_id)())
    with pytest.raises(RunTimeout, match="1199 of 1200"):
        Barrier(box, ids[0]).wait("start", parties=1200, timeout=0)
    assert Barrier(box, ids[-1]).wait("start", parties=1200) == ids


class TestMailboxFailures:
    @pytest.mark.parametrize("fault", [LostAnswers, Refusals])
    @pytest.mark.parametrize("retried", [True, False])
    def test_failures_that_pass_are_retried(self, mailbox: MemoryMailbox, clock: ManualClock, fault: type[Refusals], retried: bool) -> None:
        faulty = fault(mailbox, first(4))
        box = RetryingMailbox(faulty, clock=clock) if retried else faulty
        clock.at(20, arrives(mailbox, "B"))
        assert Barrier(box, "A", clock=clock).wait("start", parties=2) == ["A", "B"]
        assert faulty.fired.total() == 4
        assert clock.monotonic() <= 21

    def test_an_outage_is_waited_out(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        box = Outage(mailbox)
        clock.at(3.5, lambda: setattr(box, "down", True))
        clock.at(100, arrives(mailbox, "B"))
        clock.at(550.5, lambda: setattr(box, "down", False))
        assert Barrier(box, "A", clock=clock).wait("start", parties=2) == ["A", "B"]
        assert clock.monotonic() == 551

    def test_an_outage_without_end_is_an_error_after_a_stated_time(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        box = Outage(mailbox)
        box.down = True
        with pytest.raises(MailboxUnavailable, match="away"):
            Barrier(box, "A", outage_timeout=60, clock=clock).wait("start", parties=2)
        assert clock.monotonic() == 61

    def test_the_timeout_holds_during_an_outage_too(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        box = Outage(mailbox)
        box.down = True
        with pytest.raises(TimeoutError, match="0 of 2"):
            Barrier(box, "A", clock=clock).wait("start", parties=2, timeout=30)
        assert clock.monotonic() == 30


class TestTimeout:
    @pytest.mark.parametrize("timeout", [0, 0.3, 5, 5.5])
    def test_it_raises_after_that_many_seconds_and_says_who_was_there(
        self, mailbox: MemoryMailbox, clock: ManualClock, timeout: float
    ) -> None:
        arrives(mailbox, "B", "done")()
        with pytest.raises(TimeoutError, match=r"'done' of memory://.*2 of 4.*\(A, B\); no other.* here\. Call wait again") as caught:
            Barrier(mailbox, "A", poll_interval=1, clock=clock).wait("done", parties=4, timeout=timeout)
        assert isinstance(caught.value, RunTimeout)
        assert clock.monotonic() == timeout

    def test_an_arrival_at_the_last_moment_counts(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        clock.at(5.4, arrives(mailbox, "B"))
        assert Barrier(mailbox, "A", poll_interval=1, clock=clock).wait("start", parties=2, timeout=5.5) == ["A", "B"]

    def test_waiting_again_resumes(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        barrier = Barrier(mailbox, "A", clock=clock)
        with pytest.raises(TimeoutError):
            barrier.wait("start", parties=2, timeout=5)
        clock.at(5, arrives(mailbox, "B"))
        assert barrier.wait("start", parties=2, timeout=10) == ["A", "B"]

    def test_a_late_node_passes_even_after_the_others_gave_up(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        with pytest.raises(TimeoutError):
            Barrier(mailbox, "A", clock=clock).wait("start", parties=2, timeout=5)
        assert Barrier(mailbox, "B", clock=clock).wait("start", parties=2, timeout=0) == ["A", "B"]


class TestPresence:
    def test_a_session_of_this_process_knows_that_its_learner_waits(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        seen = []
        clock.at(2, lambda: seen.append(is_waiting(repr(mailbox), "A")))
        clock.at(3, arrives(mailbox, "B"))
        Barrier(mailbox, "A", clock=clock).wait("start", parties=2)
        assert seen == [True]
        assert not is_waiting(repr(mailbox), "A")

    def test_and_that_it_waits_no_more_when_the_wait_failed(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        with pytest.raises(TimeoutError):
            Barrier(mailbox, "A", clock=clock).wait("start", parties=2, timeout=1)
        assert not is_waiting(repr(mailbox), "A")

    def test_others_of_the_process_are_not_taken_for_it(self, mailbox: MemoryMailbox, clock: ManualClock) -> None:
        seen = []
        clock.at(1, lambda: seen.extend([is_waiting(repr(mailbox), "B"), is_waiting("memory://other", "A")]))
        clock.at(2, arrives(mailbox, "B"))
        Barrier(mailbox, "A", clock=clock).wait("start", parties=2)
        assert seen == [False, False]


class TestBadArguments:
    @pytest.mark.parametrize("parties", [0, -1, True, 2.0, "3", None])
    def test_parties_is_a_whole_number_of_at_least_one(self, mailbox: MemoryMailbox, parties: object) -> None:
        with pytest.raises(ConfigError, match="parties must be a whole number of at least 1"):
            Barrier(mailbox, "A").wait("start", parties=parties)  # type: ignore[arg-type]
        assert [*mailbox.list("")] == []

    @pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, "5"])
    def test_timeout_is_none_or_not_negative(self, mailbox: MemoryMailbox, timeout: float) -> None:
        with pytest.raises(ConfigError, match="timeout must be None or at least 0 seconds"):
            Barrier(mailbox, "A").wait("start", parties=1, timeout=timeout)
        assert [*mailbox.list("")] == []

    @pytest.mark.parametrize("name", ["", "x" * 201, None])
    def test_the_name_must_fit_a_key(self, mailbox: MemoryMailbox, name: str) -> None:
        with pytest.raises(InvalidName, match="barrier name"):
            Barrier(mailbox, "A").wait(name, parties=1)
        assert [*mailbox.list("")] == []

    @pytest.mark.parametrize("learner_id", ["", "a/b", "a b", None])
    def test_the_learner_id_must_be_one(self, mailbox: MemoryMailbox, learner_id: str) -> None:
        with pytest.raises(ConfigError, match="learner_id"):
            Barrier(mailbox, learner_id)

    @pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "1"])
    def test_the_poll_interval_is_above_zero(self, mailbox: MemoryMailbox, seconds: float) -> None:
        with pytest.raises(ConfigError, match="poll_interval must be a number of seconds above 0"):
            Barrier(mailbox, "A", poll_interval=seconds)

    @pytest.mark.parametrize("seconds", [-1, math.nan, "1"])
    def test_the_outage_timeout_is_not_negative(self, mailbox: MemoryMailbox, seconds: float) -> None:
        with pytest.raises(ConfigError, match="outage_timeout must be at least 0 seconds"):
            Barrier(mailbox, "A", outage_timeout=seconds)


def test_many_threads_may_wait_at_once(mailbox: MemoryMailbox) -> None:
    """On real time: the last of sixteen opens it for all."""
    late = threading.Event()

    def node(number: int) -> list[str]:
        if number == 15:
            late.wait(10)
        elif number == 14:
            late.set()
        return Barrier(mailbox, f"node-{number:02d}", poll_interval=0.01).wait("start", parties=16, timeout=30)

    assert together(range(16), node) == [[f"node-{number:02d}" for number in range(16)]] * 16
