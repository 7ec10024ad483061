"""The same campaigns on every queue and server; nodes that come late; a Lightning fit as a method."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_trials import evaluate, fit_trial, loss_of, meeting
from steering_tasks import f, htex, same

from gradientmail_torch.patterns.steering import (
    BaseThinker,
    MailboxQueues,
    MailboxTaskServer,
    ParslTaskServer,
    PipeQueues,
    ResourceCounter,
    Result,
    agent,
    event_responder,
    result_processor,
    task_submitter,
)


class Batch(BaseThinker):
    """The first example of the guide: a large batch in parallel."""

    def __init__(self, queues: Any, to_run: list[float]) -> None:
        super().__init__(queues)
        self.to_run = to_run

    @agent
    def run_batch(self) -> None:
        for x in self.to_run:
            self.queues.send_inputs(x, method="f")
        results = [self.queues.get_result() for _ in range(len(self.to_run))]
        self.best = min(results, key=lambda result: result.value).args
        self.values = sorted(result.value for result in results)


def on_pipes_and_parsl(tmp_path: Path, serve: Callable[..., Any], local: Callable[..., Any]) -> tuple[Any, list[Any]]:
    queues = PipeQueues()
    return queues, [serve(ParslTaskServer([f], queues, htex(str(tmp_path / "runinfo"))))]


def on_pipes_and_a_pool(tmp_path: Path, serve: Callable[..., Any], local: Callable[..., Any]) -> tuple[Any, list[Any]]:
    queues = PipeQueues()
    return queues, [local([f], queues, num_workers=2)]


def on_a_mailbox_and_two_nodes(tmp_path: Path, serve: Callable[..., Any], local: Callable[..., Any]) -> tuple[Any, list[Any]]:
    queues = MailboxQueues(str(tmp_path / "mailbox"), poll_interval=0.02)
    return queues, [serve(MailboxTaskServer([f], queues, learner_id=f"node-{number}")) for number in range(2)]


@pytest.mark.parametrize("place", [on_pipes_and_parsl, on_pipes_and_a_pool, on_a_mailbox_and_two_nodes])
def test_the_batch_of_the_guide_has_the_same_answers_everywhere(
    place: Any, tmp_path: Path, serve: Callable[..., Any], local: Callable[..., Any]
) -> None:
    queues, servers = place(tmp_path, serve, local)
    with queues:
        thinker = Batch(queues, [3.0, -2.0, 0.5, 1.0, 0.75])
        thinker.run()
        assert (thinker.best, thinker.values) == ((0.5,), [-2.75, -2.4375, -2.0, 1.0, 6.0])
        queues.send_kill_signal()
        for server in servers:
            server.join(60)
            assert server.exitcode == 0


class Elastic(BaseThinker):
    """As many tasks as there are slots; every fourth result is looked at by a responder that borrows a slot."""

    def __init__(self, queues: Any, total: int) -> None:
        super().__init__(queues, ResourceCounter.elastic(queues, ["look"], refresh_s=0.05))
        self.total, self.servers, self.results = total, set(), 0
        self.look, self.looked = threading.Event(), 0
        self.halfway = threading.Event()

    @task_submitter
    def submit(self) -> None:
        self.queues.send_inputs(1, method="same")

    @result_processor
    def process(self, result: Result) -> None:
        self.servers.add(result.worker_info.server)
        self.results += 1
        self.rec.release()
        if self.results % 4 == 0:
            self.look.set()
        if len(self.servers) == 2:
            self.halfway.set()
        if len(self.servers) == 3 and self.results >= self.total and self.looked:
            self.done.set()

    @event_responder(event_name="look", reallocate_resources=True, gather_from=None, gather_to="look", disperse_to=None, max_slots=1)
    def inspect(self) -> None:
        if self.rec.acquire("look", 1, timeout=30, cancel_if=self.done):
            self.looked += 1
            self.rec.release("look", 1)


def test_an_elastic_thinker_uses_the_nodes_that_are_there(tmp_path: Path, serve: Callable[..., Any]) -> None:
    queues = MailboxQueues(str(tmp_path / "mailbox"), poll_interval=0.02, lease=2.0)

    def node(name: str) -> Any:
        return serve(MailboxTaskServer([same], queues, learner_id=name, isolation="thread"))

    nodes = [node("node-0"), node("node-1")]
    thinker = Elastic(queues, total=12)
    thinker.start()
    assert thinker.halfway.wait(60)
    nodes.append(node("late"))
    assert thinker.join(60)
    assert thinker.servers == {"node-0", "node-1", "late"}
    queues.send_kill_signal()
    for server in nodes:
        server.join(60)
        assert server.exitcode == 0


class Search(BaseThinker):
    """Finds the best learning rate, and has the best model evaluated by all nodes together."""

    def __init__(self, queues: MailboxQueues, mailbox: str) -> None:
        super().__init__(queues)
        self.mailbox = mailbox
        self.curves: dict[float, list[float]] = {}
        self.trials: dict[float, Any] = {}
        self.nodes: set[Any] = set()

    @agent
    def search(self) -> None:
        rates = (0.001, 0.1, 5.0)
        for lr in rates:
            self.queues.send_inputs(lr, method="fit_trial", topic="trial")
        while len(self.trials) < len(rates):
            result = self.queues.get_result("trial")
            assert result.success, result.failure_info
            (lr,) = result.args
            if result.complete:
                self.trials[lr] = result.value
                self.nodes.add(result.worker_info.server)
            else:
                self.curves.setdefault(lr, []).append(result.value["loss"])
        self.best = min(self.trials, key=lambda lr: self.trials[lr]["loss"] if self.trials[lr]["loss"] == self.trials[lr]["loss"] else 1e9)
        for shard in range(2):
            self.queues.send_inputs(self.trials[self.best]["weights"], shard, self.mailbox, method="evaluate", topic="evaluation")
        together = meeting(self.mailbox, "thinker").wait(lambda data, _: sum(d["sum"] for d in data.values()) / 64, timeout=100)
        self.evaluated = together.value
        for _ in range(2):
            assert self.queues.get_result("evaluation").success


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lightning_fit_on_two_nodes_finds_the_best_trial_and_it_is_evaluated_at_a_synchronization_node(
    tmp_path: Path, serve: Callable[..., Any]
) -> None:
    mailbox = str(tmp_path / "mailbox")
    queues = MailboxQueues(mailbox, topics=["trial", "evaluation"], poll_interval=0.05)
    for number in range(2):
        serve(MailboxTaskServer([fit_trial, evaluate], queues, learner_id=f"node-{number}", start_method="forkserver"))
    thinker = Search(queues, mailbox)
    thinker.run()
    assert thinker.best == 0.1
    assert all(len(curve) == 3 for curve in thinker.curves.values())
    assert thinker.nodes <= {"node-0", "node-1"}
    from lightning_trials import Line

    model = Line(0.0)
    model.load_state_dict(thinker.trials[0.1]["weights"])
    assert thinker.evaluated == pytest.approx(loss_of(model, 0, 64), rel=1e-5)
    assert isinstance(thinker.trials[0.1]["weights"]["layer.weight"], torch.Tensor)
    queues.send_kill_signal()
