"""The Thinker: its agents run together, end together, and none of them fails unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from steering_tasks import count_up, f, fail, same

from gradientmail_torch.errors import ConfigError, ThinkerFailed
from gradientmail_torch.patterns.steering import (
    BaseThinker,
    PipeQueues,
    ResourceCounter,
    Result,
    agent,
    event_responder,
    result_processor,
    task_submitter,
)


class Batch(BaseThinker):
    """The first example of the guide: a large batch in parallel, by one agent."""

    def __init__(self, queues: PipeQueues, to_run: list[float]) -> None:
        super().__init__(queues)
        self.to_run = to_run
        self.best: tuple[float, ...] = ()

    @agent
    def run_batch(self) -> None:
        for x in self.to_run:
            self.queues.send_inputs(x, method="f")
        results = [self.queues.get_result() for _ in range(len(self.to_run))]
        self.best = min(results, key=lambda result: result.value).args


class Pool(BaseThinker):
    """Submits a task whenever there is room, until ten results are in."""

    def __init__(self, queues: PipeQueues, slots: int) -> None:
        super().__init__(queues, ResourceCounter(slots, ["sim"]))
        self.rec.reallocate(None, "sim", "all")
        self.results: list[Result] = []
        self.under_way, self.most = 0, 0
        self.lock = threading.Lock()

    @task_submitter(task_type="sim", n_slots=1)
    def submit(self) -> None:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        self.queues.send_inputs(self.under_way, method="same", topic="sim")

    @result_processor(topic="sim")
    def process(self, result: Result) -> None:
        with self.lock:
            self.under_way -= 1
        self.results.append(result)
        self.rec.release("sim", 1)
        if len(self.results) >= 10:
            self.done.set()


def test_a_batch_finds_its_best(pipes: Callable[..., Any], local: Callable[..., Any]) -> None:
    queues = pipes()
    local([f], queues, threads=True)
    thinker = Batch(queues, [3.0, 0.5, -2.0])
    thinker.run()
    assert thinker.best == (0.5,)


def test_submitter_and_processor_keep_the_slots_busy_and_end_together(pipes: Callable[..., Any], local: Callable[..., Any]) -> None:
    queues = pipes("sim")
    local([same], queues, threads=True, num_workers=2)
    thinker = Pool(queues, slots=3)
    thinker.start()
    assert thinker.join(30)
    assert not thinker.is_alive()
    assert len(thinker.results) >= 10
    assert thinker.most <= 3
    assert all(result.success for result in thinker.results)
    assert queues.active_count == 0
    assert thinker.rec.available_slots("sim") + thinker.under_way == 3


class Retraining(BaseThinker):
    """Every third result sets an event; its responder borrows the slots of the simulations."""

    def __init__(self, queues: PipeQueues) -> None:
        super().__init__(queues, ResourceCounter(2, ["sim", "ml"]))
        self.rec.reallocate(None, "sim", 2)
        self.retrain = threading.Event()
        self.count, self.seen, self.also = 0, [], 0
        self.all_slots = 2

    @task_submitter(task_type="sim", n_slots=1)
    def submit(self) -> None:
        self.queues.send_inputs(1, method="same", topic="sim")

    @result_processor(topic="sim")
    def process(self, result: Result) -> None:
        self.count += 1
        self.rec.release("sim", 1)
        if self.count % 3 == 0 and len(self.seen) < 2:  # results still come when it has trained for the last time
            self.retrain.set()

    @event_responder(
        event_name="retrain", reallocate_resources=True, gather_from="sim", gather_to="ml", disperse_to="sim", max_slots="all_slots"
    )
    def train(self) -> None:
        assert self.rec.acquire("ml", 2, timeout=30)
        self.seen.append(self.rec.allocated_slots("sim"))
        self.rec.release("ml", 2)
        if len(self.seen) == 2:
            self.done.set()

    @event_responder(event_name="retrain")
    def log(self) -> None:
        self.also += 1


def test_an_event_is_answered_by_all_its_responders_with_slots_that_are_borrowed(
    pipes: Callable[..., Any], local: Callable[..., Any]
) -> None:
    queues = pipes("sim")
    local([same], queues, threads=True)
    thinker = Retraining(queues)
    thinker.run()
    assert thinker.seen == [0, 0]
    assert thinker.also == 2
    assert not thinker.retrain.is_set()
    assert (thinker.rec.allocated_slots("sim"), thinker.rec.allocated_slots("ml")) == (2, 0)


class Failing(BaseThinker):
    """One processor raises while others wait: a submitter, an agent for a result, a responder for an event."""

    def __init__(self, queues: PipeQueues) -> None:
        super().__init__(queues, ResourceCounter(1))
        self.never = threading.Event()
        self.seen: BaseException | None = None

    @agent(startup=True)
    def begin(self) -> None:
        self.queues.send_inputs("boom", method="same")
        self.queues.send_inputs("left", method="same", topic="other")

    @agent
    def waits_for_ever(self) -> None:
        try:
            self.queues.get_result("silent")
        except ThinkerFailed as error:
            self.seen = error.__cause__
            raise

    @result_processor
    def process(self, result: Result) -> None:
        raise RuntimeError(result.value)

    @task_submitter
    def submit(self) -> None:
        pass

    @event_responder(event_name="never")
    def respond(self) -> None:
        pass


@pytest.mark.parametrize("how", ["run", "start and join"])
def test_an_agent_that_raises_ends_the_application_with_its_traceback(
    pipes: Callable[..., Any], local: Callable[..., Any], how: str
) -> None:
    queues = pipes("other", "silent")
    local([same], queues, threads=True)
    thinker = Failing(queues)
    if how == "start and join":
        thinker.start()
    with pytest.raises(RuntimeError, match="boom") as raised:
        thinker.run() if how == "run" else thinker.join()
    assert raised.traceback[-1].name == "process"
    assert thinker.seen is raised.value


def test_results_that_stream_in_after_done_are_all_processed(pipes: Callable[..., Any], local: Callable[..., Any]) -> None:
    class Streaming(BaseThinker):
        def __init__(self, queues: PipeQueues) -> None:
            super().__init__(queues)
            self.values: list[Any] = []

        @agent
        def begin(self) -> None:
            self.queues.send_inputs(5, method="count_up")  # and done

        @result_processor
        def process(self, result: Result) -> None:
            self.values.append((result.value, result.complete))

    queues = pipes()
    thinker = Streaming(queues)
    thinker.start()
    assert thinker.done.wait(10)
    local([count_up], queues)
    assert thinker.join(30)
    assert thinker.values == [*((i, False) for i in range(5)), (5, True)]


def test_a_failed_task_is_a_result_like_any_other(pipes: Callable[..., Any], local: Callable[..., Any]) -> None:
    class One(BaseThinker):
        @agent
        def ask(self) -> None:
            self.queues.send_inputs("no", method="fail")
            self.result = self.queues.get_result()

    queues = pipes()
    local([fail], queues, threads=True)
    thinker = One(queues)
    thinker.run()
    assert thinker.result.success is False
    assert "ValueError: no" in thinker.result.failure_info.traceback


def test_each_agent_has_its_own_name_and_logger_and_is_prepared_and_torn_down(pipes: Callable[..., Any]) -> None:
    seen: list[tuple[str, Any]] = []

    class Named(BaseThinker):
        def prepare_agent(self) -> None:
            seen.append(("prepare", self.agent_name))

        def tear_down_agent(self) -> None:
            seen.append(("tear down", self.agent_name))

        @agent
        def only(self) -> None:
            seen.append(("run", self.logger.name))

    Named(pipes(), logger_name="campaign").run()
    assert seen == [("prepare", "only"), ("run", "campaign.only"), ("tear down", "only")]


def test_a_startup_agent_may_end_without_ending_the_others(pipes: Callable[..., Any]) -> None:
    class Two(BaseThinker):
        order: list[str]

        @agent(startup=True)
        def first(self) -> None:
            self.order = ["first"]
            self.started.set()

        @agent
        def second(self) -> None:
            self.started.wait()
            self.order.append(f"second, done: {self.done.is_set()}")

    thinker = Two(pipes())
    thinker.started = threading.Event()
    thinker.run()
    assert thinker.order == ["first", "second, done: False"]


def test_mistakes_are_named(pipes: Callable[..., Any]) -> None:
    class NoAgents(BaseThinker):
        pass

    class NoCounter(BaseThinker):
        @task_submitter
        def submit(self) -> None:
            pass

    class NoEvent(BaseThinker):
        @event_responder(event_name="missing")
        def respond(self) -> None:
            pass

    for kind, text in ((NoAgents, "has no agents"), (NoCounter, "pass a ResourceCounter"), (NoEvent, "lacks the attribute 'missing'")):
        with pytest.raises(ConfigError, match=text):
            kind(pipes()).run()
    with pytest.raises(ConfigError, match="two pools"):
        event_responder(event_name="x", reallocate_resources=True, gather_from="a", gather_to="a")
