"""What becomes of a learner's progress when it adopts a commit, case by case."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.algorithms.adoption import Outcome


def algorithm(**changes: Any) -> DecoupledDiLoCo:
    return DecoupledDiLoCo(**{"sync_every": 1000, "fragments": 1, "wire": "fp32", "commit_wire": "fp32", "grace": 0.0} | changes)


def vector(value: float) -> torch.nn.Module:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.full((2,), value))
    return model


def other_commits(world: Any, *changes: float) -> None:
    """Another learner moves the run on by ``changes``, a version each."""
    b = world.nodes.get("b") or world.node("b")
    for change in changes:
        b.train(change)
        b.contribute()
        b.tick("publisher")
        version = b.fragment.known + 1
        b.until(lambda version=version: b.fragment.known >= version, "syncer", "aligner")
        b.boundary()
    b.tick("heartbeat")  # which names the version


def test_a_merged_contribution_moves_into_the_commit_and_the_steps_since_stay(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    a.contribute()
    a.tick("publisher")
    a.train(10.0)
    a.merge(1)
    a.boundary()
    assert a.fragment.values[0].tolist() == [1.0, 1.0]
    assert a.w == [11.0, 11.0]
    assert a.fragment.pending is None
    assert a.replica.uncontributed(a.fragment).steps == 1


def test_who_made_no_contribution_keeps_everything_since_the_base(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0, steps=2)
    other_commits(world, 100.0)
    a.until(lambda: a.fragment.known == 1, "observer", "aligner")
    a.boundary()
    assert a.w == [102.0, 102.0]
    assert a.replica.uncontributed(a.fragment).steps == 2


def test_a_late_contribution_keeps_everything_and_stays_what_it_was(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    a.contribute()
    other_commits(world, 100.0)
    a.tick("publisher")  # only now is its delta known
    a.until(lambda: a.fragment.known == 1, "observer", "aligner")
    a.boundary()
    assert a.w == [101.0, 101.0]
    assert a.fragment.pending.delta(a.fragment.specs)[0].tolist() == [1.0, 1.0]
    a.tick("publisher")
    a.merge(2)
    a.boundary()
    assert a.fragment.values[0].tolist() == [101.0, 101.0]


def test_a_commit_waits_until_the_snapshot_has_been_encoded_against_its_base(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    a.contribute()
    other_commits(world, 100.0)
    a.until(lambda: a.fragment.known == 1, "observer", "aligner")
    a.boundary()
    assert a.w == [1.0, 1.0]
    a.tick("publisher", "aligner")
    a.boundary()
    assert a.w == [101.0, 101.0]
    assert a.fragment.pending.delta(a.fragment.specs)[0].tolist() == [1.0, 1.0]


def test_the_commit_of_a_round_that_may_hold_the_contribution_is_read_though_its_version_is_skipped(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    a.contribute()
    a.tick("publisher")
    world.node("b", algorithm())
    world.nodes["b"].merge(1)  # a's contribution, by another
    world.nodes["b"].tick("aligner")
    world.nodes["b"].boundary()
    other_commits(world, 10.0, 100.0)
    a.until(lambda: a.fragment.known == 3, "observer", "aligner")
    assert a.fragment.pending.outcome is Outcome.MERGED
    a.boundary()
    assert a.w == [111.0, 111.0]
    assert a.session.stats().tally.merged == 1


def merge_elsewhere(world: Any, a: Any) -> None:
    """Let another node commit version 1: a node does not fetch its own contribution, so it would not see what befell it."""
    world.node("merger", a.session.algorithm).merge(1)
    a.until(lambda: a.fragment.known == 1, "observer", "aligner")


def test_a_contribution_whose_data_is_gone_is_offered_anew_with_what_came_since(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    a.contribute()
    a.tick("publisher")
    world.mailbox.delete(world.record(1).data.key)
    a.train(10.0)
    merge_elsewhere(world, a)
    assert world.commit(1).left_out[0].reason == "missing"
    a.boundary()
    assert a.w == [11.0, 11.0]
    assert a.replica.uncontributed(a.fragment).steps == 2
    a.session.close()
    assert world.commit(2).merged[0].steps == 2
    assert a.fragment.values[0].tolist() == [11.0, 11.0]


def spoil(world: Any, learner_id: str = "a") -> None:
    """What a bad disk or a bad actor does to a contribution's data."""
    key = world.record(1, learner_id).data.key
    world.mailbox.put(key, b"x" * len(world.mailbox.get(key)))


def test_a_contribution_that_was_left_out_for_what_it_is_takes_all_local_progress_with_it(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    a.contribute()
    a.tick("publisher")
    spoil(world)
    a.train(10.0, steps=2)
    merge_elsewhere(world, a)
    a.boundary()
    assert a.w == [0.0, 0.0]
    tally = a.session.stats().tally
    assert (tally.rejected, tally.discarded_work.steps) == (1, 3)
    assert a.replica.uncontributed(a.fragment).steps == 0


def test_without_local_progress_the_parameters_are_the_commit_to_the_last_bit(world: Any) -> None:
    a = world.node("a", algorithm())
    other_commits(world, 0.1, 0.3333333, -7.7)
    a.until(lambda: a.fragment.known == 3, "observer", "aligner")
    a.boundary()
    assert torch.equal(a.model.w.detach(), a.fragment.values[0])


def test_bf16_parameters_keep_what_they_cannot_hold_until_they_can(world: Any) -> None:
    """256 + 0.5 is 256 in bf16, and the half is not lost: two of them make 257, which bf16 rounds to 256 or 258."""
    a, reference = world.node("a", algorithm(), model=vector(256.0).bfloat16()), world.node("b", algorithm(), model=vector(256.0))
    for version in range(1, 9):
        reference.train(0.5)
        reference.contribute()
        reference.tick("publisher")
        reference.until(lambda version=version: reference.fragment.known >= version, "syncer", "aligner")
        reference.boundary()
        reference.tick("heartbeat")
        a.until(lambda version=version: a.fragment.known == version, "observer", "aligner")
        a.train(0.0)
    assert reference.w == [260.0, 260.0]
    assert a.w == [260.0, 260.0]
    a.contribute()
    a.tick("publisher")
    assert a.fragment.pending.delta(a.fragment.specs)[0].tolist() == [0.0, 0.0], "rounding of the device is no progress of the learner"


# --- the other rules -----------------------------------------------------------------------------------


def test_overwrite_takes_the_commit_and_counts_what_it_drops(world: Any) -> None:
    a = world.node("a", algorithm(adoption="overwrite"))
    a.train(1.0)
    a.contribute()
    a.tick("publisher")
    a.train(10.0, steps=3)
    a.merge(1)
    a.boundary()
    assert a.w == [1.0, 1.0]
    tally = a.session.stats().tally
    assert (tally.merged_work.steps, tally.discarded_work.steps) == (1, 3)


def test_overwrite_keeps_a_contribution_on_its_way_and_drops_the_steps(world: Any) -> None:
    a = world.node("a", algorithm(adoption="overwrite"))
    a.train(1.0)
    a.contribute()
    other = world.node("b", algorithm(adoption="overwrite"))
    other_commits(world, 100.0)
    a.tick("publisher")
    a.until(lambda: a.fragment.known == 1, "observer", "aligner")
    a.boundary()
    assert a.w == [100.0, 100.0]
    a.tick("publisher")
    a.merge(2)
    a.boundary()
    assert a.w == [101.0, 101.0]
    assert other.session.stats().tally.discarded_work.steps == 0


def test_overwrite_cannot_offer_again_what_it_has_overwritten(world: Any) -> None:
    a = world.node("a", algorithm(adoption="overwrite"))
    a.train(1.0)
    a.contribute()
    a.tick("publisher")
    world.mailbox.delete(world.record(1).data.key)
    merge_elsewhere(world, a)
    a.boundary()
    assert a.w == [0.0, 0.0]
    assert a.session.stats().tally.discarded_work.steps == 1
    assert a.replica.uncontributed(a.fragment).steps == 0


def test_mix_goes_half_way_to_the_commit(world: Any) -> None:
    a = world.node("a", algorithm(adoption="mix"))
    other_commits(world, 100.0)
    a.train(10.0)
    a.until(lambda: a.fragment.known == 1, "observer", "aligner")
    a.boundary()
    assert a.w == [55.0, 55.0]


@pytest.mark.parametrize("adoption", ["rebase", "overwrite", "mix"])
def test_whatever_the_rule_every_step_is_carried_merged_or_discarded(world: Any, adoption: str) -> None:
    a, b = world.node("a", algorithm(adoption=adoption, sync_every=2)), world.node("b", algorithm(adoption=adoption, sync_every=3))
    for step in range(20):
        a.train(1.0)
        b.train(0.5)
        if step % 3 == 0:
            world.turn(2)
    for node in (a, b):
        tally, carried = node.session.stats().tally, node.replica.uncontributed(node.fragment).steps
        flying = node.fragment.pending.work.steps if node.fragment.pending else 0
        assert tally.merged_work.steps + tally.discarded_work.steps + carried + flying == 20


# --- staleness -----------------------------------------------------------------------------------------


def test_a_learners_own_steps_on_an_old_base_are_counted_and_waiting_adds_none(world: Any) -> None:
    a = world.node("a", algorithm(sync_every=4, max_staleness=2))
    a.train(1.0, steps=3)
    assert a.session.stats().staleness_steps == 0, "nothing newer is on its way"
    a.contribute()
    a.clock.advance(10_000)
    assert a.session.stats().staleness_steps == 3


def test_beyond_the_staleness_bound_a_warning_is_given_once_though_nothing_else_happens(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The upload hangs: nothing is due, and nothing comes from the background."""
    a = world.node("a", algorithm(sync_every=4, max_staleness=2))
    a.train(1.0, steps=4)
    assert a.fragment.pending is not None
    a.train(1.0, steps=4)
    assert a.session.stats().tally.stale_warnings == 0
    a.train(1.0, steps=20)
    assert a.session.stats().tally.stale_warnings == 1
    assert len([record for record in caplog.records if "steps on a base that the run has left" in record.message]) == 1
    world.turn(8)
    a.train(1.0)
    assert a.session.stats().staleness_steps == 0
    assert a.w == [29.0, 29.0], "nothing is lost"
    a.train(1.0, steps=20)
    assert a.session.stats().tally.stale_warnings == 2


class Normalised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))


def test_running_statistics_move_on_where_every_commit_is_a_cycle_late(world: Any) -> None:
    """A snapshot is taken right after an adoption: to take a commit's statistics whole would undo all that was done since."""
    model = Normalised()
    a = world.node("a", model=model)
    for _ in range(20):
        with torch.no_grad():
            model.running.mul_(0.9).add_(0.1)  # of ones
            model.count.add_(1)
            model.w.add_(1.0)
        a.session.step(samples=1)
        world.turn(4)
        a.boundary()
        if a.fragment.pending is None:
            a.contribute()
    assert a.fragment.version >= 5
    assert (model.running > 0.5).all()
    assert (a.fragment.values[1] > 0.4).all()
    assert model.count.item() == 20
    a.session.close()
    assert torch.equal(model.running, a.fragment.values[1])
