"""Contributions on their way into the mailbox: data first, record second, in the round that is open."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, wire
from gradientmail_torch.errors import ConfigError, MailboxUnavailable, TrainingDiverged
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Contribution, DataRef
from gradientmail_torch.session.publisher import GIVES_UP_AFTER
from gradientmail_torch.testing.faults import Crash, CrashBefore, LostAnswers, Refusals, first


def strikes(prefix: str, times: int = 1) -> Any:
    """Chooses the first ``times`` operations that write below ``prefix``."""
    choice = first(times)
    return lambda operation, key: operation.startswith("put") and key.startswith(prefix) and choice(operation, key)


def test_the_data_is_there_before_the_record_that_names_it(world: Any, mailbox: MemoryMailbox) -> None:
    a = world.node("a", mailbox=CrashBefore(mailbox, strikes("rounds/")))
    a.train(steps=2)
    a.contribute()
    with pytest.raises(Crash):
        a.tick("publisher")
    assert len(world.keys("data/")) == 1
    assert not world.keys("rounds/")


def test_a_record_says_what_was_done_and_its_data_holds_it(world: Any) -> None:
    a = world.node("a")
    a.train(3.0, steps=2, samples=8)
    a.contribute()
    a.tick("publisher")
    record = world.record(1)
    assert (record.learner_id, record.generation, record.steps, record.samples, record.anchor) == ("a", 1, 2, 16, "init")
    assert record.norms == pytest.approx((math.hypot(6, 6),))
    assert [t.tolist() for t in a.run.tensors(record.data, a.fragment.specs)] == [[6.0, 6.0]]


def test_what_is_trained_after_the_snapshot_is_not_in_it(world: Any) -> None:
    a = world.node("a")
    a.train(1.0)
    a.contribute()
    a.train(100.0)
    a.tick("publisher")
    assert [t.tolist() for t in a.run.tensors(world.record(1).data, a.fragment.specs)] == [[1.0, 1.0]]


@pytest.mark.parametrize("fault", [Refusals, LostAnswers])
@pytest.mark.parametrize("where", ["data/", "rounds/"])
def test_an_answer_that_fails_is_tried_again_with_the_same_contribution(world: Any, mailbox: MemoryMailbox, fault: Any, where: str) -> None:
    a = world.node("a", mailbox=fault(mailbox, strikes(where, 2)))
    a.train()
    a.contribute()
    for _ in range(2):
        with pytest.raises(MailboxUnavailable):
            a.tick("publisher")
    a.tick("publisher")
    a.tick("publisher")
    assert world.keys("rounds/") == [keys.contribution(0, 1, "a")]
    assert world.record(1).nonce == a.fragment.pending.nonce
    assert a.run.tensors(world.record(1).data, a.fragment.specs)[0].tolist() == [1.0, 1.0]


def test_a_contribution_that_came_late_is_recorded_in_the_next_round_with_the_same_data(world: Any) -> None:
    a, b = world.node("a"), world.node("b")
    world.meet()
    for node in (a, b):
        node.train()
        node.contribute()
    a.tick("publisher")
    assert [merged.learner_id for merged in a.merge(1).merged] == ["a"]  # b's upload takes longer than the round
    b.tick("publisher")  # it has not heard of the commit, and records in the round that was open
    assert world.record(1, "b") is not None
    assert b.fragment.pending.version == 1
    b.tick("aligner", "publisher")
    assert world.record(2, "b").nonce == world.record(1, "b").nonce
    assert world.record(2, "b").data == world.record(1, "b").data
    assert [merged.learner_id for merged in b.merge(2).merged] == ["b"]
    b.tick("aligner")
    b.boundary()
    assert b.w == [2.0, 2.0]


def test_the_round_of_the_record_counts_and_not_that_of_the_upload(world: Any, mailbox: MemoryMailbox) -> None:
    a, b = world.node("a"), world.node("b", mailbox=Refusals(mailbox, strikes("rounds/")))
    world.meet()
    for node in (a, b):
        node.train()
        node.contribute()
    with pytest.raises(MailboxUnavailable):
        b.tick("publisher")  # the upload is there, the record is not
    a.tick("publisher")
    a.merge(1)
    world.meet()
    b.tick("aligner", "publisher")
    assert world.record(1, "b") is None
    assert world.record(2, "b") is not None


def test_where_an_earlier_life_of_the_id_is_in_the_round_the_next_one_is_taken(world: Any) -> None:
    a = world.node("a", DecoupledDiLoCo(sync_every=1000, fragments=1, quorum_size=2, wire="fp32", commit_wire="fp32"))
    ref = DataRef(key=keys.data(0, 1, "a", "0123456789", "delta"), size=5, sha256="0" * 64)
    earlier = Contribution(nonce="0123456789", learner_id="a", generation=0, steps=1, samples=1, norms=(1.0,), anchor="init", data=ref)
    world.put(keys.contribution(0, 1, "a"), earlier)
    a.train()
    a.contribute()
    a.tick("publisher")
    assert world.record(1).nonce == "0123456789"
    a.session._membership.state = "leaving"
    world.turn(6)
    a.boundary()
    assert world.commit(1).merged == ()
    assert (world.commit(2).merged[0].learner_id, world.commit(2).merged[0].generation) == ("a", 1)
    assert a.w == [1.0, 1.0]
    assert a.fragment.pending is None


def test_the_learners_uplink_is_measured(world: Any, mailbox: MemoryMailbox) -> None:
    a = world.node("a")

    class Timed:
        def __getattr__(self, name: str) -> Any:
            return getattr(mailbox, name)

        def put(self, key: str, body: bytes) -> None:
            a.clock.advance(2.0)
            mailbox.put(key, body)

    a.run.mailbox = Timed()
    a.train()
    a.contribute()
    a.tick("publisher")
    assert a.engine.publisher.uplink == world.record(1).data.size / 2.0


def test_what_the_wire_format_loses_stays_local_progress(world: Any) -> None:
    a = world.node("a", DecoupledDiLoCo(sync_every=1000, fragments=1, wire="bf16", commit_wire="fp32", grace=0.0))
    a.train(1.001)  # not a bf16 number
    a.contribute()
    a.train(0.0)
    world.turn(4)
    a.boundary()
    sent = float(torch.tensor(1.001).bfloat16())
    assert a.fragment.values[0].tolist() == pytest.approx([sent, sent])
    assert a.w == pytest.approx([1.001, 1.001]), "the rest is carried to the next contribution"


def test_what_waits_for_the_delta_is_woken_as_soon_as_it_is_known(world: Any) -> None:
    """Its data may take minutes to upload, and a commit that is there need not wait for that."""
    a = world.node("a")
    woken = []

    class Watching(Refusals):
        def put(self, key: str, body: Any) -> None:
            woken.append(a.engine._workers["aligner"]._awake.is_set())

    a.train()
    a.contribute()
    a.engine._workers["aligner"]._awake.clear()
    a.run.mailbox = Watching(world.mailbox, lambda operation, key: False)
    a.tick("publisher")
    assert woken == [True]


# --- what is not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_progress_that_is_not_finite_is_discarded_counted_and_reported(world: Any, caplog: pytest.LogCaptureFixture, bad: float) -> None:
    a = world.node("a")
    a.train(1.0, steps=2)
    a.contribute()
    world.turn(4)
    a.boundary()
    a.train(bad, steps=3)
    a.contribute()
    a.train(1.0)
    with caplog.at_level(logging.WARNING):
        world.turn(4)
    a.train(1.0)
    assert a.w == [2.0, 2.0], "set back to the last commit"
    assert world.keys("data/0000/0000000002/") == []
    assert a.session.stats().tally.discarded_work.steps == 5
    assert a.session.stats().tally.rejected == 1
    assert len([r for r in caplog.records if "not finite" in r.message]) == 1, "said once"
    a.train(1.0)
    a.session.close()
    assert a.w == [3.0, 3.0]


def test_a_learner_gives_up_when_nothing_that_it_does_is_finite(world: Any) -> None:
    a = world.node("a")

    def offer(progress: float) -> None:
        a.train(progress)
        a.contribute()
        a.tick("publisher")
        world.turn(4)
        a.boundary()

    for progress in [math.nan] * (GIVES_UP_AFTER - 1) + [1.0] + [math.nan] * (GIVES_UP_AFTER - 1):
        offer(progress)
    assert a.w == [1.0, 1.0]
    with pytest.raises(TrainingDiverged, match=r"tensor 'w'.*Restart this node"):
        offer(math.nan)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("least", torch.full((2,), torch.finfo(torch.float32).min))
        self.register_buffer("mean", torch.zeros(2))


def test_a_mask_of_infinities_is_no_progress_that_is_not_finite(world: Any) -> None:
    a, b = world.node("a", model=Masked()), world.node("b", model=Masked())
    for node in (a, b):
        node.train(1.0, steps=2)
        node.contribute()
    world.turn(6)
    for node in (a, b):
        node.boundary()
        assert node.session.stats().tally.merged_work.steps == 2
        assert not node.session.stats().tally.discarded_work.steps
        assert torch.equal(node.model.mask, Masked().mask)
        assert torch.equal(node.model.least, Masked().least)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_statistic_that_is_not_finite_any_more_is_discarded_by_name(world: Any, caplog: pytest.LogCaptureFixture, bad: float) -> None:
    a = world.node("a", model=Masked())
    a.train(1.0)
    a.model.mean[0] = bad
    a.contribute()
    world.turn(4)
    a.boundary()
    assert a.session.stats().tally.discarded_work.steps == 1
    assert a.model.mean.tolist() == [0.0, 0.0]
    assert "1 steps of this learner are not finite (tensor 'mean')" in caplog.text


def test_a_run_is_not_founded_with_parameters_that_are_not_finite(world: Any) -> None:
    model = Masked()
    model.w.data[0] = math.nan
    with pytest.raises(ConfigError, match="'w' is not finite to begin with"):
        world.node("a", model=model)
    assert not world.keys("run.json")


def test_the_training_thread_hears_of_it_though_it_is_alone_and_nothing_else_is_due(world: Any) -> None:
    a = world.node("a", DecoupledDiLoCo(sync_every=2, fragments=1, grace=0.0))
    a.train(math.nan, steps=2)
    a.tick("publisher")
    a.train(0.0)
    assert a.w == [0.0, 0.0]


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.v = nn.Parameter(torch.zeros(2))


def test_only_the_fragment_that_is_not_finite_is_set_back(world: Any) -> None:
    a = world.node("a", DecoupledDiLoCo(sync_every=2, fragments=2, grace=0.0, wire="fp32", commit_wire="fp32"), model=TwoParts())
    with torch.no_grad():
        a.model.w.fill_(math.nan)
        a.model.v.fill_(5.0)
    a.session.step(1)
    a.session.step(1)
    world.turn(4)
    a.session.step(1)
    assert a.model.w.tolist() == [0.0] * 3
    assert a.model.v.tolist() == [5.0] * 2
    assert world.commit(1, fragment=1).merged


def test_a_running_statistic_that_is_not_finite_counts_too(world: Any) -> None:
    model = nn.BatchNorm1d(2)
    model.w = model.weight
    a = world.node("a", model=model)
    model.running_mean.fill_(math.nan)
    a.train(0.5)
    a.contribute()
    world.turn(3)
    a.boundary()
    assert model.running_mean.tolist() == [0.0, 0.0]
    assert a.session.stats().tally.rejected == 1


def test_the_delta_is_kept_as_the_mailbox_holds_it(world: Any) -> None:
    a = world.node("a", DecoupledDiLoCo(sync_every=1000, fragments=1, wire="bf16", grace=0.0))
    a.train(0.3333333)
    a.contribute()
    a.tick("publisher")
    record = world.record(1)
    data = world.mailbox.get(record.data.key)
    assert torch.equal(wire.decode(data, a.fragment.specs, "bf16", key="k")[0], a.fragment.pending.delta(a.fragment.specs)[0])


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(5000))


@pytest.mark.parametrize("name", wire.WIRES)
def test_what_is_uploaded_again_is_the_same_in_every_format(world: Any, mailbox: MemoryMailbox, name: wire.Wire) -> None:
    """Encoded anew, what a lossy format had left would lose some more, and differ from what this learner takes to be sent."""
    algorithm = DecoupledDiLoCo(sync_every=1000, fragments=1, wire=name, grace=0.0)
    a = world.node("a", algorithm, model=Large(), mailbox=LostAnswers(mailbox, strikes("data/")))
    with torch.no_grad():
        a.model.w.add_(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    a.session.step(samples=4, steps=2)
    a.contribute()
    with pytest.raises(MailboxUnavailable):
        a.tick("publisher")
    (key,) = world.keys("data/")
    first_bytes = mailbox.get(key)
    a.tick("publisher")
    assert mailbox.get(key) == first_bytes
    assert world.record(1).data.key == key
    assert torch.equal(wire.decode(first_bytes, a.fragment.specs, name, key="k")[0], a.fragment.pending.delta(a.fragment.specs)[0])
