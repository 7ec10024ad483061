"""Who merges a round, when, and what becomes of those who come second."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, OuterSGD
from gradientmail_torch.algorithms.quorum import merge_order
from gradientmail_torch.errors import CorruptObject, MailboxUnavailable
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Claim, Commit, read
from gradientmail_torch.session.membership import Membership
from gradientmail_torch.testing.faults import Crash, CrashAfter, CrashBefore, Interposed, LostAnswers, Refusals, first


def algorithm(**changes: Any) -> DecoupledDiLoCo:
    return DecoupledDiLoCo(**{"sync_every": 1000, "fragments": 1, "wire": "fp32", "commit_wire": "fp32", "grace": 0.0} | changes)


def offer(node: Any, change: float = 1.0, steps: int = 1) -> None:
    node.train(change, steps=steps)
    node.contribute()
    node.tick("publisher")


def in_order(world: Any, version: int = 1) -> list[Any]:
    """The nodes in the order in which they may claim the round."""
    nodes = world.nodes
    some = next(iter(nodes.values()))
    order = merge_order(some.run.manifest.nonce, 0, version, {i: node.engine.publisher.uplink for i, node in nodes.items()})
    return [nodes[learner_id] for learner_id in order]


def three(world: Any, **changes: Any) -> list[Any]:
    """Three nodes that see each other; a round with one contribution is open."""
    nodes = [world.node(learner_id, algorithm(**changes)) for learner_id in "abc"]
    offer(nodes[0])
    for _ in range(2):
        world.meet()
    return in_order(world)


def claim(world: Any, attempt: int = 1, version: int = 1) -> Claim | None:
    return read(world.mailbox, Claim, keys.claim(0, version, attempt))


def put_below(prefix: str, times: int = 1) -> Any:
    choice = first(times)
    return lambda operation, key: operation.startswith("put") and key.startswith(prefix) and choice(operation, key)


# --- when ----------------------------------------------------------------------------------------------


def test_without_a_contribution_there_is_nothing_to_merge(world: Any) -> None:
    a = world.node("a", algorithm())
    a.train()
    world.turn(5)
    assert world.commit(1) is None
    assert not world.keys("claims/")


def test_a_round_below_its_quorum_stays_open_and_says_who_is_there(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    a, b = world.node("a", algorithm(quorum_size=2)), world.node("b", algorithm(quorum_size=2))
    world.meet()
    offer(a)
    with caplog.at_level(logging.WARNING):
        world.turn(70)
    assert world.commit(1) is None
    said = [r.message for r in caplog.records if "of 2 contributions" in r.message]
    assert said, "silence would be a hang"
    assert "(a)" in said[0]
    assert "waiting for b" in said[0]
    assert len(said) <= 2 * 3, "once in 30 seconds each"
    offer(b)
    world.turn(5)
    assert {merged.learner_id for merged in world.commit(1).merged} == {"a", "b"}


def test_a_learner_that_has_not_seen_its_own_beat_yet_is_there_all_the_same(world: Any) -> None:
    a = world.node("a", algorithm(quorum_size=2))
    a.engine._membership._observer.peers = {}  # looked before its own first beat was written
    offer(a)
    for _ in range(3):
        a.tick("syncer")
    assert world.commit(1) is None


def test_a_round_waits_its_grace_for_the_others_in_training(world: Any) -> None:
    first_, *_ = three(world, grace=20.0)
    first_.tick("syncer")
    first_.clock.advance(19.0)
    world.meet()
    first_.tick("syncer")
    assert world.commit(1) is None
    first_.clock.advance(1.0)
    first_.tick("syncer")
    assert world.commit(1) is not None


def test_no_grace_passes_where_all_in_training_have_contributed(world: Any) -> None:
    nodes = three(world, grace=1000.0)
    for node in nodes:
        if node.id != "a":
            offer(node)
    nodes[0].tick("syncer")
    assert len(world.commit(1).merged) == 3


def test_the_first_round_of_a_large_run_waits_for_all_since_none_was_in_the_one_before(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Membership, "sampled", True)
    nodes = three(world, grace=20.0)
    for node in nodes:
        node.tick("syncer")
    assert world.commit(1) is None
    for node in nodes:
        if node.id != "a":
            offer(node)
    nodes[0].tick("syncer")
    assert len(world.commit(1).merged) == 3


@pytest.mark.parametrize("state", ["waiting", "leaving", "joining"])
def test_a_round_does_not_wait_for_those_who_are_not_training(world: Any, state: str) -> None:
    nodes = three(world, grace=1000.0)
    for node in world.nodes.values():
        if node.id != "a":
            node.session._membership.state = state
    world.meet()
    world.turn(8)
    assert [merged.learner_id for merged in world.commit(1).merged] == ["a"]
    assert nodes


def test_a_round_does_not_wait_for_the_dead(world: Any) -> None:
    a, b = world.node("a", algorithm(grace=1000.0), lease=30.0), world.node("b", algorithm(grace=1000.0), lease=30.0)
    world.meet()
    offer(a)
    del world.nodes["b"]  # killed
    world.turn(20)
    assert world.commit(1) is None
    world.turn(20)
    assert [merged.learner_id for merged in world.commit(1).merged] == ["a"]
    b.engine.stop(1.0)


def test_where_every_live_learner_is_leaving_the_quorum_is_what_is_left(world: Any) -> None:
    a, b = (world.node(i, algorithm(quorum_size=3)) for i in "ab")
    world.meet()
    offer(a)
    world.turn(3)
    assert world.commit(1) is None
    for node in (a, b):
        node.session._membership.state = "leaving"
    world.turn(6)
    assert world.commit(1) is not None


# --- whose turn ----------------------------------------------------------------------------------------


def test_the_first_in_the_order_claims_at_once_and_merges(world: Any) -> None:
    first_, second, _ = three(world)
    second.tick("syncer")
    assert claim(world) is None
    first_.tick("syncer")
    assert claim(world).learner_id == first_.id
    assert world.commit(1).by == first_.id


@pytest.mark.parametrize("place", [1, 2])
def test_the_kth_claims_when_it_has_seen_the_round_free_for_k_delays(world: Any, place: int) -> None:
    node = three(world)[place]
    delay = node.session._settings.claim_delay
    node.tick("syncer")
    node.clock.advance(place * delay - 0.01)
    node.tick("observer", "syncer")
    assert claim(world) is None
    node.clock.advance(0.01)
    node.tick("syncer")
    assert world.commit(1).by == node.id


def test_a_claim_of_one_who_is_alive_is_respected(world: Any) -> None:
    first_, second, _ = three(world)
    first_.run.mailbox = CrashBefore(world.mailbox, put_below("data/"))
    with pytest.raises(Crash):
        first_.tick("syncer")
    assert claim(world).learner_id == first_.id
    for _ in range(10):
        first_.tick("heartbeat")
        second.clock.advance(second.session._settings.claim_delay)
        second.tick("observer", "syncer")
    assert world.commit(1) is None
    assert claim(world, 2) is None


def stuck(world: Any) -> tuple[Any, Any, Any]:
    """The first in the order has claimed and died before it could merge."""
    first_, second, third = three(world)
    first_.run.mailbox = CrashBefore(world.mailbox, put_below("data/"))
    with pytest.raises(Crash):
        first_.tick("syncer")
    first_.run.mailbox = world.mailbox
    for node in (second, third):
        node.tick("syncer")
        node.clock.advance(node.session._settings.claim_delay * 3)
        node.tick("heartbeat")
    for node in (second, third):
        node.tick("observer", "syncer")
    assert claim(world, 2) is None
    return first_, second, third


def test_a_claim_whose_owner_falls_silent_is_taken_over_by_the_next_in_the_order(world: Any) -> None:
    first_, second, third = stuck(world)
    for _ in range(60):
        for node in (second, third):
            node.clock.advance(1.0)
            node.tick("heartbeat", "observer", "syncer")
    taken = claim(world, 2)
    assert taken.learner_id == world.commit(1).by != first_.id
    assert claim(world, 3) is None


def test_a_claim_of_an_earlier_life_of_its_owner_is_taken_over(world: Any) -> None:
    first_, second, _ = stuck(world)
    again = world.nodes[first_.id]
    world.mailbox.put(keys.learner(first_.id, 2), world.mailbox.get(keys.learner(first_.id, 1)))
    world.mailbox.put(keys.beat(first_.id, 2), world.mailbox.get(keys.beat(first_.id, 1)))
    second.tick("observer", "syncer")
    second.clock.advance(2 * second.session._settings.claim_delay)
    second.tick("observer", "syncer")
    assert world.commit(1).by == second.id
    assert again is first_


def test_a_claim_whose_owner_lives_and_never_commits_is_taken_over_after_merge_timeout(world: Any) -> None:
    first_, second, _ = stuck(world)
    waited = 0.0
    while world.commit(1) is None:
        first_.tick("heartbeat")  # it is alive, and stuck
        second.clock.advance(2.0)
        waited += 2.0
        second.tick("observer", "syncer")
        assert waited < 1000
    limit = second.session._settings.merge_timeout
    assert limit <= waited <= limit + 2.0, "at once, as the owner is passed over"


def test_stale_claims_are_passed_one_after_the_other(world: Any) -> None:
    """One who comes late finds the claims of three that have died."""
    a = world.node("a", algorithm())
    offer(a)
    for attempt, owner in enumerate(("x", "y", "z"), 1):
        world.put(keys.claim(0, 1, attempt), Claim(nonce="0" * 32, learner_id=owner, generation=1))
    a.merge(1)
    assert claim(world, 4).learner_id == "a"


def test_an_attempt_of_our_own_that_was_cut_short_goes_on_without_another_claim(world: Any) -> None:
    a = world.node("a", algorithm())
    world.meet()  # it lives, so to others its claim is not stale
    offer(a)
    a.run.mailbox = Refusals(world.mailbox, put_below("data/"))
    with pytest.raises(MailboxUnavailable):
        a.tick("syncer")
    a.tick("syncer")
    assert world.commit(1).by == "a"
    assert claim(world, 2) is None


def test_a_claim_whose_answer_was_lost_is_our_own(world: Any) -> None:
    a = world.node("a", algorithm())
    offer(a)
    a.run.mailbox = LostAnswers(world.mailbox, put_below("claims/"))
    with pytest.raises(MailboxUnavailable):
        a.tick("syncer")
    a.tick("syncer")
    a.tick("syncer")
    assert world.commit(1).by == "a"
    assert claim(world, 2) is None


def test_a_restarted_owner_of_a_claim_takes_its_own_earlier_claim_over(world: Any) -> None:
    a = world.node("a", algorithm())
    offer(a)
    a.run.mailbox = CrashBefore(world.mailbox, put_below("data/"))
    with pytest.raises(Crash):
        a.tick("syncer")
    a.engine.stop(1.0)
    again = world.node("a", algorithm(), lease=5.0)
    assert again.merge(1).by == "a"
    assert world.commit(1).generation == 2
    assert [merged.generation for merged in world.commit(1).merged] == [1], "the recorded contribution of the dead counts"


# --- those who come second -----------------------------------------------------------------------------


class WhileUploading(Interposed):
    """Somebody else does something while a merged fragment is on its way up."""

    def __init__(self, inner: MemoryMailbox, meanwhile: Any) -> None:
        super().__init__(inner)
        self.meanwhile = meanwhile

    def put(self, key: str, body: Any) -> None:
        super().put(key, body)
        if key.startswith("data/"):
            doing, self.meanwhile = self.meanwhile, lambda: None
            doing()


def other_commit(world: Any) -> None:
    world.put(
        keys.commit(0, 1),
        Commit(nonce="f" * 32, fragment=0, version=1, by="z", generation=1, parameters=world.nodes["a"].run.manifest.initial[0]),
    )


def test_who_loses_the_race_deletes_its_data_and_adopts_the_winners(world: Any) -> None:
    a = world.node("a", algorithm(outer=OuterSGD(lr=0.7, momentum=0.5)))
    offer(a)
    a.run.mailbox = WhileUploading(world.mailbox, lambda: other_commit(world))
    a.tick("syncer")
    assert world.commit(1).by == "z"
    assert [key for key in world.keys("data/") if not key.endswith(".delta")] == []
    a.tick("aligner")
    a.boundary()
    assert a.fragment.nonce == "f" * 32


def test_who_loses_the_race_keeps_its_data_until_it_has_read_the_winners_record(world: Any) -> None:
    """An answer that was lost may have been our own commit: then the data is the run's."""
    a = world.node("a", algorithm())
    offer(a)
    a.run.mailbox = LostAnswers(world.mailbox, put_below("commits/"))
    with pytest.raises(MailboxUnavailable):
        a.tick("syncer")
    assert world.mailbox.get(world.commit(1).parameters.key) is not None
    a.tick("syncer", "aligner")
    a.boundary()
    assert a.fragment.version == 1
    assert a.w == [1.0, 1.0]
    assert world.mailbox.get(world.commit(1).parameters.key) is not None
    assert len(world.keys("data/0000/0000000001/")) == 2, "its delta and its merge: a second merge has been removed"


@pytest.mark.parametrize("hidden", [False, True], ids=["it is ours", "it cannot be seen"])
def test_a_store_that_refuses_a_commit_falsely_does_not_make_us_delete_what_it_names(world: Any, hidden: bool) -> None:
    """A proxy has repeated the request, and hands on the answer to the second."""

    class Repeating(Interposed):
        def put_if_absent(self, key: str, body: Any) -> bool:
            return self.inner.put_if_absent(key, body) and not key.startswith("commits/")

        def get(self, key: str, **window: Any) -> bytes | None:
            return None if hidden and key.startswith("commits/") else self.inner.get(key, **window)

    a = world.node("a", algorithm())
    offer(a)
    a.run.mailbox = Repeating(world.mailbox)
    a.tick("syncer")
    assert world.mailbox.get(world.commit(1).parameters.key) is not None
    a.run.mailbox = world.mailbox
    a.tick("aligner")
    a.boundary()
    assert a.w == [1.0, 1.0]


def test_where_the_winner_cannot_be_read_nothing_is_deleted(world: Any) -> None:
    a = world.node("a", algorithm())
    offer(a)
    a.run.mailbox = WhileUploading(world.mailbox, lambda: world.mailbox.put(keys.commit(0, 1), b"?"))
    with pytest.raises(CorruptObject):
        a.tick("syncer")
    assert [key for key in world.keys("data/") if key.endswith(".whole")]


def test_a_committed_round_is_not_merged_again_by_one_who_does_not_know_it_yet(world: Any) -> None:
    first_, second, _ = three(world)
    first_.tick("syncer")
    assert world.commit(1).by == first_.id
    before = world.keys("data/")
    for _ in range(8):
        second.tick("syncer")
        second.clock.advance(second.session._settings.claim_delay)
    assert world.keys("data/") == before
    second.tick("heartbeat")
    assert second.fragment.known == 1 or second.fragment.hint == 1 or not world.keys("rounds/0000/0000000001/")


def test_a_sleeper_that_wakes_after_the_takeover_is_refused_and_adopts_the_other(world: Any) -> None:
    first_, second, third = three(world)

    def takeover() -> None:
        for _ in range(60):
            for node in (second, third):
                node.clock.advance(1.0)
                node.tick("heartbeat", "observer", "syncer")

    first_.run.mailbox = WhileUploading(world.mailbox, takeover)
    first_.tick("syncer")
    commit = world.commit(1)
    assert commit.by in (second.id, third.id)
    assert [key for key in world.keys("data/") if key.startswith(f"data/0000/0000000001/{first_.id}-") and key.endswith(".whole")] == []
    world.turn(4)
    for node in world.nodes.values():
        node.boundary()
    assert {node.fragment.nonce for node in world.nodes.values()} == {commit.nonce}


def test_a_commit_made_before_a_crash_stands(world: Any) -> None:
    first_, second, _ = three(world)
    first_.run.mailbox = CrashAfter(world.mailbox, put_below("commits/"))
    with pytest.raises(Crash):
        first_.tick("syncer")
    commit = world.commit(1)
    second.merge(1)
    assert world.commit(1) == commit
    assert commit.by == first_.id


# --- calling -------------------------------------------------------------------------------------------


def test_a_contribution_of_another_makes_ones_own_due_at_the_next_step(world: Any) -> None:
    a, b = world.node("a", algorithm(grace=100.0)), world.node("b", algorithm(grace=100.0))
    world.meet()
    a.train(steps=2)
    assert a.fragment.pending is None
    offer(b)
    a.tick("syncer")
    assert a.fragment.pending is None, "at a step boundary"
    a.train()
    assert a.fragment.pending.work.steps == 3


def test_ones_own_contribution_calls_nobody_and_without_called_none_does(world: Any) -> None:
    a, b = world.node("a", algorithm(grace=100.0)), world.node("b", algorithm(grace=100.0, called=False))
    world.meet()
    offer(a)
    a.tick("syncer")
    assert not a.fragment.called
    b.train()
    b.tick("syncer")
    b.train()
    assert b.fragment.pending is None


def test_a_call_to_a_round_that_has_closed_meanwhile_is_no_call_to_the_next(world: Any) -> None:
    a, b = world.node("a", algorithm(grace=100.0)), world.node("b", algorithm())
    world.meet()
    a.train()
    offer(b)
    a.tick("syncer")
    assert a.fragment.called
    b.merge(1)
    b.tick("aligner", "heartbeat")
    a.tick("observer", "aligner")
    a.train()
    assert a.fragment.version == 1
    assert a.fragment.pending is None


# --- what a commit says --------------------------------------------------------------------------------


def test_a_commit_names_what_it_holds_with_the_weights_used(world: Any) -> None:
    a, b = world.node("a", algorithm()), world.node("b", algorithm())
    world.meet()
    a.train(1.0, steps=2, samples=4)
    b.train(10.0, steps=1, samples=1)
    for node in (a, b):
        node.contribute()
        node.tick("publisher")
    commit = a.merge(1)
    assert [merged.nonce for merged in commit.merged] == sorted(merged.nonce for merged in commit.merged)
    assert {merged.learner_id: merged.weight for merged in commit.merged} == {"a": 8 * 8 / 2, "b": 1.0}
    values = a.run.values(commit)[0].tolist()
    assert values == pytest.approx([(32 * 2.0 + 10.0) / 33] * 2)


def test_where_all_are_left_out_the_round_closes_unchanged_and_says_why(world: Any) -> None:
    a = world.node("a", algorithm(outer=OuterSGD(lr=0.7, momentum=0.5)))
    offer(a)
    a.merge(1)
    a.tick("aligner")
    a.boundary()
    offer(a)
    data = world.record(2).data.key
    world.mailbox.put(data, b"x" * len(world.mailbox.get(data)))
    commit = world.node("b", a.session.algorithm).merge(2)
    assert commit.merged == ()
    assert [(out.learner_id, "digest" in out.reason) for out in commit.left_out] == [("a", True)]
    assert a.run.values(commit)[0].tolist() == a.run.values(world.commit(1))[0].tolist()
    assert [t.tolist() for t in a.run.outer_state(commit)] == [t.tolist() for t in a.run.outer_state(world.commit(1))]


def test_a_committed_value_is_what_a_replay_of_its_records_gives_bit_for_bit(world: Any) -> None:
    """From the initial value, with nothing but what the commits name."""
    settings = algorithm(merge="rda", outer=OuterSGD(lr=0.7, momentum=0.5), wire="bf16")
    nodes = [world.node(learner_id, settings, keep=None) for learner_id in "abc"]
    for round_ in range(3):
        world.meet()
        for place, node in enumerate(nodes):
            node.train(0.1 + 0.37 * place, steps=place + 1)
            node.contribute()
            node.tick("publisher")
        nodes[round_].merge(round_ + 1)
        for node in nodes:
            node.tick("heartbeat")
        for node in nodes:
            node.tick("observer", "aligner")
            node.boundary()
    run, specs = nodes[0].run, nodes[0].fragment.specs
    values, state = run.initial(0), None
    for version in (1, 2, 3):
        commit = world.commit(version)
        values, state = _replayed(run, specs, commit, values, state, settings)
    assert [t.tolist() for t in values] == [t.tolist() for t in nodes[0].fragment.values]


def _replayed(run: Any, specs: Any, commit: Commit, values: Any, state: Any, settings: DecoupledDiLoCo) -> Any:
    from gradientmail_torch.algorithms.merge import Weighted, merge, norms

    def contributions() -> Any:
        for each in commit.merged:
            tensors = run.tensors(each.data, specs)
            yield Weighted(weight=each.weight, tensors=tensors, norms=norms(tensors, specs), clips=each.clips)

    merged = merge(contributions, specs, commit.method)  # type: ignore[arg-type]
    return settings.outer.step(values, merged, state, specs, commit.version)


def test_a_syncer_does_not_fetch_its_own_contribution(world: Any) -> None:
    a = world.node("a", algorithm())
    offer(a)
    before = a.session.stats().usage.bytes_down
    a.tick("syncer")
    assert a.run.commit(0, 1) is not None
    assert a.session.stats().usage.bytes_down - before < 2000
