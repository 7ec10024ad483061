"""Shared Queue: every item handed to one node at a time and counted done once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from gradientmail_torch.errors import ConfigError, CorruptObject, MailboxUnavailable, RunTimeout, WorkFenced
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.queue import Progress, SharedQueue
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Crash, LostAnswers, Outage, nth

Node = Callable[..., SharedQueue]
InThreads = Callable[[int, Callable[[int], None]], None]


@pytest.fixture
def node(box: Mailbox, quiet_clock: type[ManualClock]) -> Node:
    """A node with a clock of its own, a lease of 8 s and a look every second, whose heart does not beat unless it ends."""

    def make(learner_id: str, *, box: Mailbox = box, name: str = "shards", **options: object) -> SharedQueue:
        return SharedQueue(name, box, learner_id, **{"lease": 8.0, "clock": quiet_clock(), **options})  # type: ignore[arg-type]

    return make


# --- handing out ---------------------------------------------------------------------------------------


def test_one_node_gets_every_item_once_in_order(mailbox_url: str, quiet_clock: type[ManualClock]) -> None:
    queue = SharedQueue("epoch/0 ü", mailbox_url, "node-0", clock=quiet_clock())
    assert queue.fill([{"file": f"shard-{number}", "range": [number, None]} for number in range(70)]) == 70
    assert queue.progress() == Progress(done=0, claimed=0, left=70, failed=0)
    assert [item["file"] for item in queue] == [f"shard-{number}" for number in range(70)]  # type: ignore[index]
    assert queue.progress() == Progress(done=70, claimed=0, left=0, failed=0)
    assert list(queue) == []


def test_nodes_at_work_at_the_same_time_share_the_items(mailbox_url: str, in_threads: InThreads) -> None:
    box = open_mailbox(mailbox_url)
    taken: Counter[object] = Counter()

    def run(number: int) -> None:
        queue = SharedQueue("shards", box, f"node-{number}", poll_interval=0.01)
        queue.fill(range(40))
        for item in queue:
            taken[item] += 1

    in_threads(4, run)
    assert taken == Counter(range(40))
    assert sorted(outcome.item for outcome in SharedQueue("shards", box, "reader").outcomes()) == [f"{place:010d}" for place in range(40)]


def test_an_item_is_done_when_the_loop_asks_for_the_next(node: Node) -> None:
    queue = node("a")
    queue.fill(["x", "y"])
    seen = []
    for item in queue:
        seen.append((item, queue.progress().done, queue.progress().claimed))
    assert seen == [("x", 0, 1), ("y", 1, 1)]


@pytest.mark.parametrize(("nodes", "most"), [(1, 2.2), (8, 2.5)])
def test_ten_thousand_items_cost_two_to_three_requests_each(nodes: int, most: float, in_threads: InThreads) -> None:
    """In memory, for speed: how many requests are made does not depend on the backend."""
    box = CountingMailbox(MemoryMailbox())
    taken: Counter[object] = Counter()

    def run(number: int) -> None:
        queue = SharedQueue("shards", box, f"node-{number}", poll_interval=0.05)
        queue.fill(range(10_000))
        for item in queue:
            taken[item] += 1

    in_threads(nodes, run)
    assert taken.total() == len(taken) == 10_000
    assert sum(box.usage.requests.values()) / 10_000 <= most


def test_the_order_is_random_per_seed_where_asked(node: Node) -> None:
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        queue = node("n", name=name)
        queue.fill(range(100), seed=seed)
        orders.append(list(queue))
    assert orders[0] == orders[1] != orders[2] != list(range(100))
    assert sorted(orders[2]) == list(range(100))  # type: ignore[type-var]


def test_an_empty_queue_ends_at_once(node: Node) -> None:
    queue = node("a")
    queue.fill([])
    assert list(queue) == []
    assert queue.progress() == Progress(done=0, claimed=0, left=0, failed=0)


# --- dying and giving back -----------------------------------------------------------------------------


def test_a_dead_nodes_items_go_to_the_others_after_the_lease(node: Node) -> None:
    dead = node("dead")
    dead.fill(range(5))
    held = dead.tasks()
    lost = next(held)
    alive = node("alive")
    tasks = []
    for task in alive.tasks():
        tasks.append((task.value, task.attempt))
        assert alive.progress() == Progress(done=len(tasks) - 1, claimed=min(2, 6 - len(tasks)), left=max(0, 4 - len(tasks)), failed=0)
    assert tasks == [(1, 1), (2, 1), (3, 1), (4, 1), (0, 2)]
    assert alive.progress() == Progress(done=5, claimed=0, left=0, failed=0)
    with pytest.raises(WorkFenced):
        lost.done()
    held.close()
    assert alive.progress() == Progress(done=5, claimed=0, left=0, failed=0)


def test_without_draining_a_node_does_not_wait_for_the_others(node: Node) -> None:
    other = node("other")
    other.fill(range(3))
    held = other.tasks()
    next(held)
    queue = node("a", drain=False)
    assert list(queue) == [1, 2]
    assert queue.progress() == Progress(done=2, claimed=1, left=0, failed=0)
    held.close()
    assert list(node("b", drain=False)) == [0]


def test_leaving_the_loop_gives_the_item_back_at_once(node: Node) -> None:
    queue = node("a")
    queue.fill(range(3))

    def work_off() -> list[float]:
        return [1 / item for item in queue]  # type: ignore[operator]

    with pytest.raises(ZeroDivisionError):
        work_off()
    waiting = node("b")
    assert sorted((task.value, task.attempt) for task in waiting.tasks()) == [(0, 2), (1, 1), (2, 1)]  # type: ignore[type-var]


def test_stop_ends_the_loop_after_the_item_it_is_at(node: Node) -> None:
    queue = node("a")
    queue.fill(range(10))
    seen = []
    for item in queue:
        seen.append(item)
        if item == 3:
            queue.stop()
    assert seen == [0, 1, 2, 3]
    assert queue.progress() == Progress(done=4, claimed=0, left=6, failed=0)


def test_a_failing_item_is_tried_again_and_given_up_after_its_attempts(node: Node) -> None:
    queue = node("a", max_attempts=3)
    queue.fill(["good", "bad", "good too"])
    tried = []
    for item in queue:
        tried.append(item)
        if item == "bad":
            queue.requeue(ValueError("cannot read it: \udcff"))
    assert tried.count("bad") == 3
    assert queue.progress() == Progress(done=2, claimed=0, left=0, failed=1)
    assert list(queue.failures()) == [1]
    assert "cannot read it" in queue.failures()[1]


def test_an_item_that_kills_its_nodes_is_given_up(node: Node) -> None:
    node("filler").fill(["poison"])
    held = []
    for number in (1, 2):
        loop = node(f"victim-{number}", max_attempts=2).tasks()
        assert next(loop).attempt == number
        held.append(loop)
    queue = node("last", max_attempts=2)
    assert queue.progress() == Progress(done=0, claimed=1, left=0, failed=0)
    assert list(queue) == []
    assert queue.progress() == Progress(done=0, claimed=0, left=0, failed=1)
    assert "2 tries came to nothing" in queue.failures()[0]
    for loop in held:
        loop.close()


def test_requeue_outside_a_loop_is_refused(node: Node) -> None:
    with pytest.raises(ConfigError, match="no loop"):
        node("a").requeue("why")


def test_several_items_may_be_held_and_settled_in_any_order(node: Node) -> None:
    queue = node("a")
    queue.fill(range(4))
    with queue.open() as taker:
        tasks = [taker.take() for _ in range(4)]
        assert taker.take() is None, "what is left is held here"
        for task in reversed(tasks):
            assert task is not None
            if task.value == 2:
                task.release()
            else:
                task.done({"seen": task.value})
        again = taker.take()
        assert again is not None
        assert (again.value, again.attempt) == (2, 2)
        again.done()
        assert taker.take() is None
    assert [outcome.decoded() for outcome in queue.outcomes()] == [{"seen": 0}, {"seen": 1}, None, {"seen": 3}]


def test_a_taker_goes_on_after_an_outage(node: Node, box: Mailbox) -> None:
    store = Outage(box)
    queue = node("a", box=store, outage_timeout=0.0)
    queue.fill(range(4))
    with queue.open() as taker:
        done = []
        for number in range(6):
            store.down = number == 2
            with contextlib.suppress(MailboxUnavailable):
                task = taker.take()
                if task is not None:
                    task.done()
                    done.append(task.value)
        assert taker.finished
    assert sorted(done) == [0, 1, 2, 3]


def test_a_result_that_no_record_holds_is_refused_and_the_item_is_not_done(node: Node) -> None:
    queue = node("a")
    queue.fill(["x"])
    with queue.open() as taker:
        task = taker.take()
        assert task is not None
        with pytest.raises(ConfigError, match="put the value elsewhere"):
            task.done("x" * (17 << 20))
        assert taker.take() is None
        assert not taker.finished
        task.done("short")
    assert [outcome.decoded() for outcome in queue.outcomes()] == ["short"]


# --- filling -------------------------------------------------------------------------------------------


def test_several_nodes_may_fill_a_queue_with_the_same_items(node: Node) -> None:
    for number in range(3):
        assert node(f"n{number}").fill([{"a": 1, "b": number} for number in range(3)], seed=7) == 3
    assert node("n3").fill([{"b": number, "a": 1} for number in range(3)], seed=7) == 3


@pytest.mark.parametrize(("items", "seed"), [([1, 2, 4], None), ([1, 2], None), ([2, 1, 3], None), ([1, 2, 3], 1), ([], None)])
def test_other_items_under_the_same_name_are_refused(items: list[int], seed: int | None, node: Node, box: Mailbox) -> None:
    node("a").fill([1, 2, 3])
    before = list(box.list(""))
    with pytest.raises(ConfigError, match=r"'shards' .* other items"):
        node("b").fill(items, seed=seed)
    assert list(box.list("")) == before


def test_a_race_to_fill_with_other_items_leaves_nothing_behind(node: Node, box: Mailbox) -> None:
    class Quick(CountingMailbox):
        """Another node fills the queue just before this one's manifest."""

        def put_if_absent(self, key: str, body: object) -> bool:
            if not box.get(key):
                node("quick").fill([9])
            return super().put_if_absent(key, body)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="other items"):
        node("slow", box=Quick(box)).fill([1, 2, 3])
    assert len(list(box.list("queues/shards/items/"))) == 1
    assert list(node("c")) == [9]


@pytest.mark.parametrize("item", [float("nan"), {1: 2}, b"x", object(), "\udc80", [10**5000], [{"deep": {"er": {3}}}], "x" * (128 << 10)])
def test_an_item_that_is_no_json_value_is_refused_before_anything_is_recorded(item: object, node: Node, box: Mailbox) -> None:
    with pytest.raises(ConfigError, match="item 1 of queue 'shards'"):
        node("a").fill([0, item])
    assert list(box.list("")) == []


@pytest.mark.parametrize("items", ["text", b"bytes", {"a": 1}])
def test_what_is_no_list_is_refused(items: object, node: Node) -> None:
    with pytest.raises(ConfigError, match="takes a list"):
        node("a").fill(items)  # type: ignore[arg-type]


def test_a_queue_that_nobody_fills_says_so(node: Node) -> None:
    with pytest.raises(RunTimeout, match="not filled within 30 s"):
        list(node("a", fill_timeout=30.0))


def test_altered_items_are_noticed(node: Node, box: Mailbox) -> None:
    queue = node("a")
    queue.fill([1, 2, 3])
    (block,) = box.list("queues/shards/items/")
    box.put(block, b"[1,2,4]")
    with pytest.raises(CorruptObject, match="not what the queue was filled with"):
        list(queue)


@pytest.mark.parametrize(
    "options", [{"lease": 1.0, "poll_interval": 0.5}, {"poll_interval": 0.0}, {"max_attempts": 0}, {"max_attempts": 1.5}, {"name": ""}]
)
def test_settings_that_cannot_work_are_refused(options: dict[str, object], node: Node) -> None:
    with pytest.raises(ConfigError):
        node("a", **options)


# --- faults --------------------------------------------------------------------------------------------


def work_off(queue: SharedQueue) -> None:
    queue.fill(range(3))
    for _ in queue:
        pass


def test_a_node_may_die_at_any_operation(
    node: Node, box: Mailbox, killed: Callable[..., Mailbox], deaths: Callable[..., Iterator[tuple[int, bool]]]
) -> None:
    for number, after in deaths():
        name = f"{number}-{after}"
        try:
            work_off(node("mortal", name=name, box=killed(box, number, after=after)))
            break  # it lived
        except Crash:
            heir = node("heir", name=name)
            work_off(heir)
            assert heir.progress() == Progress(done=3, claimed=0, left=0, failed=0), (number, after)
    assert number > 10


def test_a_lost_answer_at_any_operation_changes_nothing(node: Node, box: Mailbox) -> None:
    number, fired = 0, True
    while fired:
        number += 1
        lossy = LostAnswers(box, nth(number))
        work_off(node("a", name=f"queue-{number}", box=lossy))
        fired = bool(lossy.fired)
        assert node("b", name=f"queue-{number}").progress() == Progress(done=3, claimed=0, left=0, failed=0), number
        assert len(list(box.list(f"queues/queue-{number}/claims/"))) == 3, number
    assert number > 10
