"""Leaving a run: no step of a closing learner stays outside, and no round is left open behind the last one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.algorithms.quantize import KEPT
from gradientmail_torch.errors import BackgroundFailure, ConfigError, GradientMailError, LearnerFenced, RunTimeout
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, read
from gradientmail_torch.session import align
from gradientmail_torch.testing.faults import Outage


def algorithm(**changes: Any) -> DecoupledDiLoCo:
    return DecoupledDiLoCo(**{"sync_every": 1000, "fragments": 1, "wire": "fp32", "commit_wire": "fp32", "grace": 0.0} | changes)


def committed(node: Any) -> list[float]:
    """The run's newest parameters."""
    model = type(node.model)()
    align(model, mailbox=node.run.mailbox)
    return model.w.tolist()


def test_everything_that_was_done_is_in_a_commit(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0, steps=7)
    a.session.close()
    assert committed(a) == [7.0, 7.0] == a.w
    assert a.session.stats().tally.merged_work.steps == 7


def test_what_is_done_while_a_contribution_is_on_its_way_takes_a_round_of_its_own(world: Any) -> None:
    """A single last round would lose the tail."""
    a = world.node("a", algorithm(sync_every=4))
    a.train(1.0, steps=4)  # contributed
    a.train(10.0, steps=3)
    a.session.close()
    assert committed(a) == [34.0, 34.0]
    assert world.commit(2).merged[0].steps == 3


class Large(nn.Module):
    """Of two blocks of the sparse format."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8192))


@pytest.mark.parametrize("trained_after", [0, 3])
def test_what_sparse_contributions_have_left_out_goes_with_the_last_one(world: Any, trained_after: int) -> None:
    a = world.node("a", algorithm(sync_every=4, wire="sparse"), model=Large())
    a.train(1.0, steps=4)
    world.turn(4)
    assert committed(a).count(4.0) == 2 * KEPT
    a.train(1.0, steps=trained_after)
    a.session.close()
    assert committed(a) == [4.0 + trained_after] * 8192 == a.w
    assert a.session.stats().tally.merged_work.steps == 4 + trained_after


def test_a_step_that_is_held_back_has_a_sample_even_where_steps_have_not(world: Any) -> None:
    """Its contribution could not be read, and each round that was made of it called for the next one."""
    a = world.node("a", algorithm(sync_every=4, wire="sparse"), model=Large())
    for _ in range(2):
        with torch.no_grad():
            a.model.w.add_(1.0)
        a.session.step(samples=1, steps=4)
        world.turn(4)
    a.session.close()
    assert committed(a) == [2.0] * 8192
    tally = a.session.stats().tally
    assert (tally.merged_work.steps, tally.merged_work.samples) == (8, 2)


def test_two_that_close_one_after_the_other_lose_nothing(world: Any) -> None:
    a, b = world.node("a", algorithm()), world.node("b", algorithm())
    world.meet()
    a.train(1.0, steps=5)
    b.train(2.0, steps=5)
    a.session.close()
    b.train(4.0)
    b.session.close()
    for node in (a, b):
        tally = node.session.stats().tally
        assert (tally.merged_work.steps, tally.discarded_work.steps) == (node.session.stats().steps, 0)


def test_nothing_done_is_nothing_to_wait_for(world: Any) -> None:
    a = world.node("a", algorithm(quorum_size=3))
    a.session.close()
    assert world.commit(1) is None


def test_a_closed_session_has_said_goodbye_and_takes_no_step(world: Any) -> None:
    a = world.node("a", algorithm())
    a.session.close()
    a.session.close()
    a.session.leave()
    assert read(world.mailbox, Beat, keys.beat("a", 1)).state == "ended"
    for use in (lambda: a.session.step(1), a.session.__enter__):
        with pytest.raises(GradientMailError, match="'a' is closed: construct a new one"):
            use()


def test_a_learner_that_leaves_merges_what_others_have_contributed(world: Any) -> None:
    """The last to leave commits the open round of one that has died, once it is known to be dead."""
    a, dead = world.node("a", algorithm(quorum_size=2)), world.node("dead", algorithm(quorum_size=2))
    world.meet()
    dead.train(5.0)
    dead.contribute()
    dead.tick("publisher")
    del world.nodes["dead"]
    world.turn(40)
    assert world.commit(1) is None
    a.session.close()
    assert [merged.learner_id for merged in world.commit(1).merged] == ["dead"]
    dead.engine.stop(1.0)


def test_of_two_that_leave_the_last_one_knows_that_it_is_though_it_looks_seldom(world: Any) -> None:
    nodes = [world.node(learner_id, algorithm(quorum_size=3)) for learner_id in ("a", "b")]
    dead = world.node("dead", algorithm(quorum_size=3))
    world.meet()
    dead.train(5.0)
    dead.contribute()
    dead.tick("publisher")
    dead.session._membership.state = "ended"
    dead.engine.stop(1.0)
    del world.nodes["dead"]
    world.meet()
    turns = 0

    def turn(node: Any) -> None:
        """The listing of beats takes ten times as long as all else."""
        nonlocal turns
        turns += 1
        for each in nodes:
            if not each.session._closed:
                each.tick("heartbeat", "publisher", "aligner", "syncer", *(["observer"] if turns % 10 == 0 else []))
            if each is not node:
                each.clock.advance(0.1)

    for node in nodes:
        node.clock.meanwhile = lambda node=node: turn(node)
        node.session.close()
    assert [merged.learner_id for merged in world.commit(1).merged] == ["dead"]


def test_a_learner_that_leaves_others_behind_leaves_their_rounds_to_them(world: Any) -> None:
    a, b = world.node("a", algorithm(quorum_size=2)), world.node("b", algorithm(quorum_size=2))
    world.meet()
    b.train(5.0)
    b.contribute()
    b.tick("publisher")
    a.session.close()
    assert world.commit(1) is None


# --- that cannot be had --------------------------------------------------------------------------------


def test_a_close_that_runs_out_of_time_names_round_quorum_and_who_is_live(world: Any) -> None:
    a, b = world.node("a", algorithm(quorum_size=3)), world.node("b", algorithm(quorum_size=3))
    world.meet()
    a.train(1.0, steps=4)
    with pytest.raises(
        RunTimeout, match=r"a left after 20 s without 4 steps of fragment 0, which wait for version 1 .quorum: 3.; live beside it: b"
    ):
        a.session.close(timeout=20)
    assert read(world.mailbox, Beat, keys.beat("a", 1)).state == "ended", "it is closed all the same"
    b.session.close(timeout=60)
    assert [merged.learner_id for merged in world.commit(1).merged] == ["a"], "what it had recorded counts"


def test_leaving_does_not_raise_for_what_is_missing(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    a, _ = world.node("a", algorithm(quorum_size=3)), world.node("b", algorithm(quorum_size=3))
    world.meet()
    a.train(1.0, steps=4)
    a.session.leave(timeout=20)
    assert "leaves without 4 steps" in caplog.text
    assert world.record(1) is not None


def block(node: Any, body: Any) -> None:
    """A ``with`` block that does ``body`` and ends by an error."""
    with node.session:
        body()
        raise ZeroDivisionError


def test_a_with_block_that_raises_leaves_and_lets_the_error_through(world: Any) -> None:
    a = world.node("a", algorithm())
    with pytest.raises(ZeroDivisionError):
        block(a, lambda: a.train(1.0))
    assert committed(a) == [1.0, 1.0]
    assert read(world.mailbox, Beat, keys.beat("a", 1)).state == "ended"


def test_a_session_that_was_fenced_stops_without_hiding_it(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train(1.0)
    world.mailbox.put(keys.learner("a", 2), world.mailbox.get(keys.learner("a", 1)))
    a.engine._fail(_raised(LearnerFenced, a.tick, "heartbeat"))
    with pytest.raises(LearnerFenced, match="newer process"):
        a.train(1.0)
    with pytest.raises(LearnerFenced, match="newer process"):
        a.session.close()
    a.session.leave()
    assert world.keys("rounds/") == [], "a fenced process publishes nothing more"


def test_a_goodbye_that_is_fenced_hides_no_error_of_the_block(world: Any) -> None:
    a = world.node("a", algorithm())
    a.tick = lambda *workers: None  # no heartbeat has noticed it
    with pytest.raises(ZeroDivisionError):
        block(a, lambda: world.mailbox.put(keys.learner("a", 2), world.mailbox.get(keys.learner("a", 1))))


def test_a_background_failure_is_raised_on_the_training_thread_with_its_cause(world: Any) -> None:
    a = world.node("a", algorithm())
    cause = ValueError("disk on fire")
    a.engine._fail(cause)
    with pytest.raises(BackgroundFailure, match="'a' cannot go on: disk on fire") as caught:
        a.train(1.0)
    assert caught.value.__cause__ is cause
    with pytest.raises(BackgroundFailure):
        a.session.close()


def test_a_close_that_takes_long_says_what_it_waits_for_ever_more_seldom(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    a, b = world.node("a", algorithm(quorum_size=3)), world.node("b", algorithm(quorum_size=3))
    world.meet()
    a.train(1.0, steps=4)
    with pytest.raises(RunTimeout):
        a.session.close(timeout=60)
    said = [record.getMessage() for record in caplog.records if "is closing" in record.getMessage()]
    assert 2 <= len(said) <= 3
    for text in said:
        assert "for 4 steps of fragment 0, which wait for version 1 (quorum: 3); live beside it: b" in text
    b.session.leave(timeout=0)


def test_a_close_without_a_mailbox_ends_in_time_and_says_so(world: Any, mailbox: MemoryMailbox) -> None:
    outage = Outage(mailbox)
    a = world.node("a", algorithm(), mailbox=outage)
    a.train(1.0)
    outage.down = True
    a.clock.meanwhile = lambda: None
    with pytest.raises(RunTimeout, match="1 steps of fragment 0"):
        a.session.close(timeout=30)


def test_a_close_whose_last_look_gets_no_answer_says_what_it_waited_for(world: Any, mailbox: MemoryMailbox) -> None:
    a = world.node("a", algorithm())
    a.clock.meanwhile = lambda: None
    with pytest.raises(RunTimeout, match="an answer of the mailbox"):
        a.session.close(timeout=30)


def _raised(kind: type[Exception], call: Any, *arguments: Any) -> Exception:
    with pytest.raises(kind) as caught:
        call(*arguments)
    return caught.value


@pytest.mark.parametrize("samples", [0, -1, 1.5, "3", None, True])
def test_samples_that_are_no_count_are_refused_before_anything_is_counted(world: Any, samples: Any) -> None:
    a = world.node("a", algorithm())
    with pytest.raises(ConfigError, match="samples must be a whole number of at least 1"):
        a.session.step(samples=samples)
    assert a.session.stats().steps == 0
