"""Slots are counted in pools; none is lost, none is handed out twice, and who waits longest is served first."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.patterns.steering import ResourceCounter, ServerInfo
from gradientmail_torch.patterns.steering.resources import reallocate_until


def background(stack: ExitStack, function: Any) -> Any:
    task = SYSTEM_CLOCK.spawn(function, name="test")
    stack.callback(task.join)
    return task


def until(condition: Any) -> None:
    """Wait until ``condition`` holds; the test's own timeout is the limit."""
    while not condition():
        SYSTEM_CLOCK.sleep(0.001)


def test_all_slots_begin_without_a_kind() -> None:
    counter = ResourceCounter(8, ["ml", "sim"])
    assert (counter.total_slots, counter.unallocated_slots) == (8, 8)
    assert [counter.allocated_slots(kind) for kind in ("ml", "sim")] == [0, 0]
    assert counter.available_slots(None) == 8


def test_slots_are_moved_taken_and_given_back() -> None:
    counter = ResourceCounter(8, ["ml", "sim"])
    assert counter.reallocate(None, "ml", 5)
    assert counter.acquire("ml", 3)
    assert (counter.allocated_slots("ml"), counter.available_slots("ml"), counter.unallocated_slots) == (5, 2, 3)
    counter.release("ml", 3)
    assert counter.reallocate("ml", "sim", "all")
    assert (counter.allocated_slots("ml"), counter.available_slots("sim"), counter.total_slots) == (0, 5, 8)


def test_taking_more_than_is_free_takes_nothing() -> None:
    counter = ResourceCounter(2)
    assert not counter.acquire(None, 3, timeout=0.01)
    assert counter.available_slots(None) == 2


def test_a_waiting_request_can_be_cancelled() -> None:
    counter, cancel = ResourceCounter(0), threading.Event()
    cancel.set()
    assert not counter.acquire(None, 1, cancel_if=cancel)


def test_who_waits_longest_is_served_first(stack: ExitStack) -> None:
    counter, served = ResourceCounter(0), []

    def take(name: str, count: int) -> None:
        counter.acquire(None, count)
        served.append(name)

    for place, (name, count) in enumerate([("large", 2), ("small", 1)], start=1):
        background(stack, lambda name=name, count=count: take(name, count))
        until(lambda place=place: len(counter._waiting[None]) == place)
    counter.release(None, 1)  # enough for the small one, whose turn it is not
    assert served == []
    counter.release(None, 2)
    until(lambda: served == ["large", "small"])


def test_releasing_and_asking_again_goes_behind_those_who_wait(stack: ExitStack) -> None:
    counter, got = ResourceCounter(1), threading.Event()
    counter.acquire(None)
    background(stack, lambda: counter.acquire(None) and got.set())
    until(lambda: counter._waiting[None])
    assert counter.release(None, 1, rerequest=True, timeout=0.01) is False
    assert got.is_set()


def test_many_threads_take_each_slot_once(stack: ExitStack) -> None:
    counter, most, used, lock = ResourceCounter(3), [0], [0], threading.Lock()

    def use() -> None:
        for _ in range(50):
            counter.acquire(None)
            with lock:
                used[0] += 1
                most[0] = max(most[0], used[0])
            with lock:
                used[0] -= 1
            counter.release()

    tasks = [background(stack, use) for _ in range(8)]
    for task in tasks:
        task.join()
    assert most[0] <= 3
    assert counter.available_slots(None) == 3


def test_moving_without_blocking_calls_back() -> None:
    counter, moved = ResourceCounter(1, ["a"]), threading.Event()
    counter.acquire(None)
    assert counter.reallocate(None, "a", 1, block=False, callback=moved.set)
    counter.release()
    assert moved.wait(10)
    assert counter.allocated_slots("a") == 1


def test_mistakes_are_refused() -> None:
    counter = ResourceCounter(1, ["a"])
    with pytest.raises(KeyError, match="unknown task type 'b'"):
        counter.acquire("b", 1)
    with pytest.raises(KeyError):
        counter.reallocate(None, "b", 1)
    with pytest.raises(ConfigError, match="to itself"):
        counter.reallocate("a", "a", 1)
    with pytest.raises(ConfigError):
        ResourceCounter(1, [None])  # type: ignore[list-item]
    assert counter.available_slots(None) == 1


def test_slots_are_gathered_while_a_block_runs_and_dispersed_after_it() -> None:
    counter = ResourceCounter(4, ["sim", "ml"])
    counter.reallocate(None, "sim", 4)
    with reallocate_until(counter, gather_from="sim", gather_to="ml", disperse_to="sim", max_slots=3, slot_step=1):
        until(lambda: counter.allocated_slots("ml") == 3)
        assert counter.allocated_slots("sim") == 1
    assert (counter.allocated_slots("ml"), counter.available_slots("sim")) == (0, 4)


class Nodes:
    """A queue whose servers come and go."""

    clock = SYSTEM_CLOCK

    def __init__(self, *slots: int) -> None:
        self.slots = list(slots)

    def servers(self) -> list[ServerInfo]:
        return [ServerInfo(server_id=str(place), slots=count) for place, count in enumerate(self.slots)]


def test_an_elastic_counter_has_the_slots_of_the_servers() -> None:
    nodes = Nodes(1, 2)
    counter = ResourceCounter.elastic(nodes, refresh_s=0.0)
    assert counter.total_slots == 3
    nodes.slots.append(4)
    assert counter.total_slots == 7
    assert counter.acquire(None, 7)


def test_a_waiting_request_is_served_when_a_node_joins(stack: ExitStack) -> None:
    nodes, got = Nodes(), threading.Event()
    counter = ResourceCounter.elastic(nodes, refresh_s=0.01)
    background(stack, lambda: counter.acquire(None, 2) and got.set())
    nodes.slots.append(2)
    assert got.wait(10)


def test_slots_that_go_while_they_are_in_use_do_not_come_back() -> None:
    nodes = Nodes(1, 1)
    counter = ResourceCounter.elastic(nodes, refresh_s=0.0)
    assert counter.acquire(None, 2)
    nodes.slots.pop()
    assert counter.total_slots == 1
    counter.release()
    assert not counter.acquire(None, timeout=0)
    counter.release()
    assert counter.acquire(None, timeout=0)


def test_slots_that_go_are_taken_from_those_without_a_kind_first() -> None:
    nodes = Nodes(2, 2)
    counter = ResourceCounter.elastic(nodes, ["a", "b"], refresh_s=0.0)
    counter.reallocate(None, "a", 2)
    counter.reallocate(None, "b", 1)
    nodes.slots.pop()
    assert counter.total_slots == 2
    assert [counter.allocated_slots(kind) for kind in (None, "a", "b")] == [0, 1, 1]
