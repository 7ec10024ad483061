"""The clock that unit tests move."""

from __future__ import annotations

import threading

import pytest

from gradientmail_torch.testing.clock import ManualClock


def test_sleeping_takes_no_time_and_moves_both_readings() -> None:
    clock = ManualClock(monotonic=5.0, wall=100.0)
    clock.sleep(2.5)
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)
    assert clock.sleeps == [2.5]


def test_what_is_planned_happens_on_the_way_in_order() -> None:
    clock = ManualClock(monotonic=0.0)
    seen: list[tuple[str, float]] = []
    clock.at(2, lambda: seen.append(("late", clock.monotonic())))
    clock.at(1, lambda: (seen.append(("early", clock.monotonic())), clock.at(0.5, lambda: seen.append(("nested", clock.monotonic())))))
    clock.sleep(3)
    assert seen == [("early", 1.0), ("nested", 1.5), ("late", 2.0)]
    assert clock.monotonic() == 3.0


def test_a_wait_ends_when_the_event_is_set_or_the_time_is_up() -> None:
    clock = ManualClock(monotonic=0.0)
    event = threading.Event()
    assert not clock.wait(event, 1.0)
    clock.at(2, event.set)
    assert clock.wait(event, 10.0)
    assert clock.monotonic() == 3.0
    assert clock.wait(event)


def test_a_wait_that_nothing_ends_fails() -> None:
    with pytest.raises(AssertionError, match="nothing planned"):
        ManualClock().wait(threading.Event())


def test_it_runs_no_threads() -> None:
    with pytest.raises(AssertionError, match="SimulatedCluster"):
        ManualClock().spawn(lambda: None, name="worker")
