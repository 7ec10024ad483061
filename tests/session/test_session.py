"""Whole sessions on real time and real threads, each learner in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo, DiLoCo, LocalSGD, OuterSGD
from gradientmail_torch.errors import BackgroundFailure, MailboxUnavailable, RunTimeout
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, Commit, read
from gradientmail_torch.presence import waiting
from gradientmail_torch.session import Session, Stats, align
from gradientmail_torch.testing.faults import Interposed, Outage

QUICK: dict[str, Any] = {"lease": 3.0, "poll_interval": 0.02}


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def batches(seed: int, count: int, size: int = 4) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=rng), torch.randn(size, 2, generator=rng)) for _ in range(count)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


class Paced(Interposed):
    """A mailbox by whose requests a learner's steps are paced, so that the background keeps up with them."""

    def __init__(self, inner: Mailbox) -> None:
        super().__init__(inner)
        self._requests = 0
        self._changed = threading.Condition()

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
        with self._changed:
            self._requests += 1
            self._changed.notify_all()
        return carry_out()

    def wait_for(self, requests: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._requests >= requests, 20)


class Learner:
    """Trains ``model`` on ``data`` in a thread; ``begin`` and ``each`` say when."""

    def __init__(
        self,
        mailbox: Mailbox,
        learner_id: str,
        data: list[tuple[Tensor, Tensor]],
        algorithm: Algorithm,
        *,
        model: nn.Module | None = None,
        begin: Callable[[], object] = lambda: None,
        each: Callable[[int], object] = lambda step: None,
        **settings: Any,
    ) -> None:
        self.model = model or mlp(hash(learner_id) % 1000)
        self.stats: Stats | None = None
        self.error: BaseException | None = None
        self._arguments = (mailbox, learner_id, data, algorithm, begin, each, QUICK | settings)
        self.thread = threading.Thread(target=self._run, name=learner_id)
        self.thread.start()

    def _run(self) -> None:
        mailbox, learner_id, data, algorithm, begin, each, settings = self._arguments
        try:
            session = Session(self.model, mailbox=mailbox, learner_id=learner_id, algorithm=algorithm, **settings)
            begin()
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
            with session:
                for number, batch in enumerate(data):
                    step(self.model, optimizer, batch)
                    session.step(samples=len(batch[0]))
                    each(number)
            self.stats = session.stats()
        except BaseException as error:
            self.error = error

    def end(self) -> Stats:
        self.thread.join(60)
        assert not self.thread.is_alive(), "a learner hangs"
        if self.error is not None:
            raise self.error
        assert self.stats is not None
        return self.stats


def aligned(mailbox: Mailbox, *models: nn.Module) -> dict[str, Tensor]:
    """The run's parameters, the same to the last bit for all ``models``."""
    states = []
    for model in models:
        align(model, mailbox=mailbox)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())
    return states[0]


ALGORITHMS = {
    "defaults": DecoupledDiLoCo(sync_every=5),
    "fragments": DecoupledDiLoCo(sync_every=6, fragments=4, grace=0.02),
    "quorum": DecoupledDiLoCo(sync_every=5, fragments=2, quorum_size=2, wire="fp32", commit_wire="fp32"),
    "momentum": DecoupledDiLoCo(sync_every=5, outer=OuterSGD(lr=0.7, momentum=0.5), merge="rda"),
    "int8": DecoupledDiLoCo(sync_every=5, fragments=2, wire="int8", commit_wire="int8"),
    "sparse": DecoupledDiLoCo(sync_every=5, fragments=2, wire="sparse"),
    "samples": DecoupledDiLoCo(round_samples=60, fragments=2),
    "overwrite": DecoupledDiLoCo(sync_every=5, adoption="overwrite"),
    "mix": DecoupledDiLoCo(sync_every=5, adoption="mix"),
    "DiLoCo": DiLoCo(sync_every=5, parties=3),
    "LocalSGD": LocalSGD(sync_every=5, parties=3),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_three_learners_end_with_the_same_parameters_and_every_step_is_accounted_for(mailbox: MemoryMailbox, name: str) -> None:
    algorithm = ALGORITHMS[name]
    meeting = threading.Barrier(3)
    boxes = [Paced(mailbox) for _ in range(3)]
    learners = [
        Learner(
            boxes[i],
            f"node-{i}",
            batches(i, 24),
            algorithm,
            begin=meeting.wait,
            each=lambda step, box=boxes[i]: box.wait_for(2 * step),
            keep=None,
        )
        for i in range(3)
    ]
    stats = [learner.end() for learner in learners]
    parameters = aligned(mailbox, *(learner.model for learner in learners))
    assert all(value.isfinite().all() for value in parameters.values())
    for each in stats:
        done = each.steps * len(each.versions)
        assert each.tally.merged_work.steps + each.tally.discarded_work.steps == done
        assert each.tally.discarded_work.steps == 0 or name == "overwrite"
    check_commits(mailbox, stats)


def check_commits(mailbox: MemoryMailbox, stats: list[Stats]) -> None:
    """No contribution is in two commits, versions have no gaps, and the steps in them are those that were merged."""
    commits = [read(mailbox, Commit, key) for key in mailbox.list("commits/")]
    nonces = [merged.nonce for commit in commits if commit for merged in commit.merged]
    assert len(nonces) == len(set(nonces))
    for fragment in range(len(stats[0].versions)):
        versions = [commit.version for commit in commits if commit and commit.fragment == fragment]
        assert versions == list(range(1, len(versions) + 1))
    steps = sum(merged.steps for commit in commits if commit for merged in commit.merged)
    assert steps == sum(each.tally.merged_work.steps for each in stats)


def test_a_learner_alone_trains_as_if_there_were_no_run(mailbox: MemoryMailbox) -> None:
    data = batches(0, 40)
    alone = mlp(1)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for batch in data:
        step(alone, optimizer, batch)
    learner = Learner(mailbox, "a", data, DecoupledDiLoCo(sync_every=5, wire="fp32", commit_wire="fp32"), model=mlp(1))
    learner.end()
    for name, value in aligned(mailbox, learner.model).items():
        torch.testing.assert_close(value, alone.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_local_sgd_after_each_step_is_training_on_the_averaged_gradient(mailbox: MemoryMailbox) -> None:
    """With plain SGD and equal batches, averaging parameters after one step is averaging gradients."""
    data = [batches(i, 8) for i in range(2)]
    whole = mlp(1)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.05)
    for (x0, y0), (x1, y1) in zip(*data, strict=True):
        step(whole, optimizer, (torch.cat([x0, x1]), torch.cat([y0, y1])))
    meeting = threading.Barrier(2)
    algorithm = LocalSGD(sync_every=1, parties=2)
    learners = [Learner(mailbox, f"node-{i}", data[i], algorithm, model=mlp(1), begin=meeting.wait) for i in range(2)]
    for learner in learners:
        learner.end()
    for name, value in aligned(mailbox, *(learner.model for learner in learners)).items():
        torch.testing.assert_close(value, whole.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_diloco_is_the_paper_written_down_in_one_process(mailbox: MemoryMailbox) -> None:
    """Inner SGD for H steps, the mean of the deltas, outer SGD with Nesterov momentum by torch itself."""
    data = [batches(i, 20) for i in range(2)]
    run = mlp(1)
    outer = torch.optim.SGD(run.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for begin in range(0, 20, 5):
        ends = []
        for shard in data:
            replica = mlp(1)
            replica.load_state_dict(run.state_dict())
            inner = torch.optim.SGD(replica.parameters(), lr=0.05)
            for batch in shard[begin : begin + 5]:
                step(replica, inner, batch)
            ends.append(replica)
        for parameter, *others in zip(run.parameters(), *(end.parameters() for end in ends), strict=True):
            parameter.grad = parameter.detach() - torch.stack([other.detach() for other in others]).mean(0)
        outer.step()
    meeting = threading.Barrier(2)
    algorithm = DiLoCo(sync_every=5, parties=2)
    learners = [Learner(mailbox, f"node-{i}", data[i], algorithm, model=mlp(1), begin=meeting.wait) for i in range(2)]
    for learner in learners:
        assert learner.end().tally.adopted == 4
    for name, value in aligned(mailbox, *(learner.model for learner in learners)).items():
        torch.testing.assert_close(value, run.state_dict()[name], rtol=1e-4, atol=1e-5)


def test_a_synchronous_algorithm_says_whom_it_waits_for_in_vain(mailbox: MemoryMailbox) -> None:
    learner = Learner(mailbox, "a", batches(0, 10), LocalSGD(sync_every=5, parties=2), step_timeout=0.3)
    with pytest.raises(RunTimeout, match=r"LocalSGD waited 0.3 s for a round of 2 learners; live beside it: nobody. Start the missing"):
        learner.end()


def test_a_learner_that_joins_late_begins_where_the_run_is(mailbox: MemoryMailbox) -> None:
    half_way, joined = threading.Event(), threading.Event()

    def first_(number: int) -> None:
        if number == 20:
            half_way.set()
            assert joined.wait(20)

    algorithm = DecoupledDiLoCo(sync_every=5, grace=0.05)
    early = Learner(mailbox, "early", batches(0, 40), algorithm, each=first_)
    assert half_way.wait(20)
    late = Learner(mailbox, "late", batches(1, 20), algorithm, begin=joined.set)
    assert early.end().steps == 40
    assert late.end().tally.merged_work.steps == 20
    aligned(mailbox, early.model, late.model)


def test_running_statistics_are_averaged_and_counters_come_from_the_heaviest(mailbox: MemoryMailbox) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    meeting = threading.Barrier(2)
    algorithm = LocalSGD(sync_every=6, parties=2)
    shifted = [(x + 10, y) for x, y in batches(1, 6, size=8)]
    learners = [
        Learner(mailbox, "light", batches(0, 6, size=4), algorithm, model=made(), begin=meeting.wait),
        Learner(mailbox, "heavy", shifted, algorithm, model=made(), begin=meeting.wait),
    ]
    for learner in learners:
        learner.end()
    state = aligned(mailbox, *(learner.model for learner in learners))
    assert state["1.num_batches_tracked"].item() == 6
    separate = []
    for data in (batches(0, 6, size=4), shifted):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for batch in data:
            step(model, optimizer, batch)
        separate.append(model[1].running_mean)
    expected = (4.0 * separate[0] * 4 + 8.0 * separate[1] * 8) / (16 + 64)
    torch.testing.assert_close(state["1.running_mean"], expected, rtol=1e-4, atol=1e-4)


# --- a mailbox that fails ------------------------------------------------------------------------------


def test_a_mailbox_that_is_away_in_mid_run_stops_nobody_and_nothing_is_lost(mailbox: MemoryMailbox) -> None:
    class Noticed(Outage):
        """Says when ten requests have failed."""

        ten_failed = threading.Event()

        def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
            if sum(self.fired.values()) >= 10:
                self.ten_failed.set()
            return super()._request(operation, key, bytes_up, carry_out)

    outage = Noticed(mailbox)

    def each(number: int) -> None:
        if number == 10:
            outage.down = True
        if number == 30:  # twenty steps have been made meanwhile
            assert outage.ten_failed.wait(20)
            outage.down = False

    learner = Learner(outage, "a", batches(0, 40), DecoupledDiLoCo(sync_every=5, fragments=2), each=each)
    stats = learner.end()
    assert stats.tally.merged_work.steps == 2 * 40
    aligned(mailbox, learner.model)


def test_a_mailbox_that_stays_away_is_told_to_the_training_thread(mailbox: MemoryMailbox) -> None:
    outage = Outage(mailbox)
    told = threading.Event()

    def each(number: int) -> None:
        if number == 10:
            outage.down = True
        if number > 10:
            told.wait(0.05)

    learner = Learner(outage, "a", batches(0, 400), DecoupledDiLoCo(sync_every=5), each=each, outage_timeout=1.0)
    with pytest.raises(BackgroundFailure, match="'a' cannot go on: injected: the store is away") as caught:
        learner.end()
    assert isinstance(caught.value.__cause__, MailboxUnavailable)


def test_no_step_ever_waits_for_the_mailbox(mailbox: MemoryMailbox) -> None:
    """The mailbox answers nothing at all until a hundred steps have been made."""

    class Gate(Interposed):
        is_open = threading.Event()

        def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
            assert self.is_open.wait(30)
            return carry_out()

    gate = Gate(mailbox)
    gate.is_open.set()

    def each(number: int) -> None:
        if number == 0:
            gate.is_open.clear()
        if number == 100:
            gate.is_open.set()

    learner = Learner(gate, "a", batches(0, 120), DecoupledDiLoCo(sync_every=3, fragments=2), each=each, lease=60.0)
    assert learner.end().tally.merged_work.steps == 2 * 120


# --- what others see -----------------------------------------------------------------------------------


def test_a_learner_at_a_barrier_says_that_it_waits(world: Any, mailbox: MemoryMailbox) -> None:
    a = world.node("a")

    def state() -> str:
        a.tick("heartbeat")
        beat = read(mailbox, Beat, keys.beat("a", 1))
        assert beat is not None
        return beat.state

    assert state() == "training"
    with waiting(repr(mailbox), "a"):
        assert state() == "waiting"
        with waiting(repr(mailbox), "b"):
            assert state() == "waiting"
    with waiting(repr(mailbox), "b"), waiting("memory://another", "a"):
        assert state() == "training"


def test_a_beat_says_how_far_its_learner_has_come(world: Any, mailbox: MemoryMailbox) -> None:
    a = world.node("a")
    a.train(steps=3, samples=5)
    a.contribute()
    world.turn(4)
    beat = read(mailbox, Beat, keys.beat("a", 1))
    assert beat is not None
    assert (beat.state, beat.steps, beat.samples, beat.versions) == ("training", 3, 15, (1,))


def test_figures_can_be_read_at_any_time(world: Any) -> None:
    a = world.node("a")
    a.train(steps=2, samples=8)
    before = a.session.stats()
    assert (before.learner_id, before.steps, before.samples, before.versions) == ("a", 2, 16, (0,))
    a.session.close()
    after = a.session.stats()
    assert after.versions == (1,)
    assert after.tally.merged == 1
    assert after.usage.requests["put"] > 0
    assert after.usage.bytes_up > 0
