"""The background threads: what wakes them, what they survive and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import LearnerFenced, MailboxUnavailable
from gradientmail_torch.session.worker import Worker
from gradientmail_torch.testing.clock import ManualClock

LONG_S = 60.0


class Ticks:
    """A tick that can be waited for."""

    def __init__(self, *outcomes: float | Exception) -> None:
        self._outcomes = list(outcomes)
        self.count = 0
        self._changed = threading.Condition()

    def __call__(self) -> float:
        with self._changed:
            self.count += 1
            self._changed.notify_all()
        outcome = self._outcomes.pop(0) if self._outcomes else LONG_S
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.count >= count, 10), f"{self.count} ticks, not {count}"


Start = Callable[..., Worker]


@pytest.fixture
def failures() -> list[Exception]:
    return []


@pytest.fixture
def start(failures: list[Exception]) -> Iterator[Start]:
    workers = []

    def begin(tick: Callable[[], float], outage_timeout: float = LONG_S) -> Worker:
        workers.append(Worker("tester", tick, clock=SYSTEM_CLOCK, outage_timeout=outage_timeout, on_failure=failures.append))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.stop()
        assert worker.join(10)


def test_it_ticks_at_once_and_again_after_the_pause_that_the_tick_has_asked_for(start: Start) -> None:
    ticks = Ticks(0.0, 0.001, LONG_S)
    start(ticks)
    ticks.wait_for(3)


def test_a_wake_cuts_the_pause_short_and_none_is_lost(start: Start) -> None:
    ticks = Ticks()
    worker = start(ticks)
    for number in range(2, 50):
        worker.wake()
        ticks.wait_for(number)


def test_a_stopped_worker_ends_after_the_present_tick(start: Start) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def tick() -> float:
        inside.set()
        assert go_on.wait(10)
        return 0.0

    worker = start(tick)
    assert inside.wait(10)
    worker.stop()
    assert not worker.join(0.01), "a tick is not torn apart"
    go_on.set()
    assert worker.join(10)


def test_a_mailbox_that_is_away_is_waited_for(start: Start, failures: list[Exception], caplog: pytest.LogCaptureFixture) -> None:
    ticks = Ticks(MailboxUnavailable("away"), MailboxUnavailable("away"))
    worker = start(ticks)
    for number in (2, 3, 4):
        worker.wake()
        ticks.wait_for(number)
    assert failures == []
    assert "training goes on" in caplog.text


def test_a_mailbox_that_is_away_for_longer_than_the_outage_timeout_is_a_failure(failures: list[Exception]) -> None:
    clock = ManualClock(monotonic=0.0)
    clock.spawn = lambda target, *, name: target()  # type: ignore[method-assign,assignment,return-value]

    def tick() -> float:
        clock.advance(10.0)
        raise MailboxUnavailable("gone for good")

    Worker("tester", tick, clock=clock, outage_timeout=60.0, on_failure=failures.append)
    assert [str(failure) for failure in failures] == ["gone for good"]
    assert 60 < clock.monotonic() < 90


def test_one_answer_in_between_begins_a_new_outage(failures: list[Exception]) -> None:
    clock = ManualClock(monotonic=0.0)
    clock.spawn = lambda target, *, name: target()  # type: ignore[method-assign,assignment,return-value]
    answers = iter([False] * 4 + [True] + [False] * 100)

    def tick() -> float:
        clock.advance(10.0)
        if next(answers):
            return 0.0
        raise MailboxUnavailable("away")

    Worker("tester", tick, clock=clock, outage_timeout=60.0, on_failure=failures.append)
    assert clock.monotonic() > 110


def test_a_machine_that_slept_does_not_take_its_sleep_for_an_outage(failures: list[Exception]) -> None:
    clock = ManualClock(monotonic=0.0)
    clock.spawn = lambda target, *, name: target()  # type: ignore[method-assign,assignment,return-value]
    ticks = 0

    def tick() -> float:
        nonlocal ticks
        ticks += 1
        clock.advance(3600.0 if ticks in (2, 5) else 0.0)
        if ticks in (2, 3, 5):
            raise MailboxUnavailable("the network is not up yet")
        if ticks == 7:
            raise KeyError("the end")
        return 1.0

    Worker("tester", tick, clock=clock, outage_timeout=200.0, on_failure=failures.append)
    assert [type(failure) for failure in failures] == [KeyError]


@pytest.mark.parametrize("error", [ValueError("x"), LearnerFenced("y"), KeyError("z")], ids=repr)
def test_any_other_error_ends_the_worker_and_is_handed_over(start: Start, failures: list[Exception], error: Exception) -> None:
    worker = start(Ticks(0.0, error))
    assert worker.join(10)
    assert failures == [error]


def test_the_next_tick_is_one_that_began_after_it_was_asked_for(start: Start) -> None:
    inside, go_on = threading.Event(), threading.Semaphore(0)
    count = 0

    def tick() -> float:
        nonlocal count
        count += 1
        inside.set()
        assert go_on.acquire(timeout=10)
        return LONG_S

    worker = start(tick)
    assert inside.wait(10)
    ended = worker.next_tick()
    inside.clear()
    go_on.release()
    assert inside.wait(10), "it has been woken for a second tick"
    assert not ended(), "the one that was under way does not count"
    go_on.release()
    done = threading.Event()
    threading.Thread(target=lambda: (worker.join(10), done.set())).start()
    worker.stop()
    assert done.wait(10)
    assert ended()
    assert count == 2


def test_a_tick_that_fails_is_no_next_tick(start: Start) -> None:
    ticks = Ticks(LONG_S, MailboxUnavailable("away"), LONG_S)
    worker = start(ticks)
    ticks.wait_for(1)
    ended = worker.next_tick()
    ticks.wait_for(2)
    assert not ended()
    worker.wake()
    ticks.wait_for(3)
    worker.stop()
    assert worker.join(10)
    assert ended()
