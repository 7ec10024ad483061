"""What a learner looks at where there are so many that all records are more than it should list."""

from __future__ import annotations

from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.algorithms.quorum import delegate_order, merge_order
from gradientmail_torch.messages import Claim, Partial, encode, read
from gradientmail_torch.session import round_listing, syncer
from gradientmail_torch.session.turns import Turns

LEASE_S = 30.0


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_listing, "LISTED_WHOLLY", 0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that a learner looks into, in order."""
    found: list[str] = []
    original = syncer.contributions

    def contributions(mailbox: Any, fragment: int, version: int) -> list[str]:
        found.append(f"{fragment}/{version}")
        return original(mailbox, fragment, version)

    monkeypatch.setattr(syncer, "contributions", contributions)
    return found


def crowd(world: Any, names: str = "abcd", *, keep: int | None = 4, **changes: Any) -> list[Any]:
    """Learners that all have a contribution in the first round, in the order in which they may merge it."""
    settings = {"sync_every": 1000, "fragments": 1, "wire": "fp32", "commit_wire": "fp32", "grace": 0.0} | changes
    nodes = [world.node(name, DecoupledDiLoCo(**settings), keep=keep) for name in names]
    world.meet()
    world.meet()
    offer(nodes)
    order = merge_order(nodes[0].run.manifest.nonce, 0, 1, {node.id: node.engine.publisher.uplink for node in nodes})
    return sorted(nodes, key=lambda node: order.index(node.id))


def offer(nodes: list[Any]) -> None:
    for node in nodes:
        node.train()
        node.contribute()
        node.tick("publisher")
    meet(nodes)


def meet(nodes: list[Any]) -> None:
    for worker in ("heartbeat", "observer"):
        for node in nodes:
            node.tick(worker)


def adopt(nodes: list[Any]) -> None:
    for node in nodes:
        node.tick("aligner")
        node.boundary()


# --- merging -------------------------------------------------------------------------------------------


def test_only_the_first_in_the_order_looks_who_is_in_a_round(world: Any, looks: list[str]) -> None:
    first, *others = crowd(world)
    for _ in range(2):
        for node in others:
            node.tick("syncer")
    assert looks == []
    listings = {node.id: node.session.stats().usage.requests["list"] for node in others}
    for node in others:
        node.tick("syncer")
    assert listings == {node.id: node.session.stats().usage.requests["list"] for node in others}, "nothing calls them either"
    first.tick("syncer")
    assert looks == ["0/1"]
    assert len(world.commit(1).merged) == 4


def test_who_has_not_contributed_is_called_and_may_merge_all_the_same(world: Any, looks: list[str]) -> None:
    node, first = world.node("a"), world.node("b")
    world.meet()
    world.meet()
    offer([node])
    first.tick("syncer")
    assert first.fragment.called
    first.until(lambda: world.commit(1), "syncer")
    assert world.commit(1).by == first.id


def test_where_the_first_does_not_come_the_second_looks_and_merges(world: Any, looks: list[str]) -> None:
    _, second, *_ = crowd(world)
    second.tick("syncer")
    assert looks == []
    second.until(lambda: world.commit(1), "syncer")
    assert len(world.commit(1).merged) == 4


def test_a_round_that_another_has_claimed_is_not_looked_into_while_it_lives(world: Any, looks: list[str]) -> None:
    first, second, *_ = crowd(world)
    world.mailbox.put(keys.claim(0, 1, 1), encode(Claim(nonce="0" * 32, learner_id=first.id, generation=1)))
    for _ in range(60):
        first.tick("heartbeat")
        second.tick("observer", "syncer")
        second.clock.advance(1.0)
    assert looks == []
    assert second.session.stats().usage.requests["get"] < 200, "the claim is read once"
    for _ in range(int(2 * LEASE_S)):
        second.tick("observer", "syncer")
        second.clock.advance(1.0)
    assert world.commit(1).by == second.id, "the first fell silent"
    assert len(world.commit(1).merged) == 4


def test_a_record_that_is_gone_is_missed_when_it_is_looked_for(world: Any) -> None:
    first, _ = crowd(world, "ab", quorum_size=2)
    world.mailbox.delete(keys.contribution(0, 1, first.id))
    first.until(lambda: world.record(1, first.id), "syncer", "publisher")
    first.until(lambda: world.commit(1), "syncer")
    assert len(world.commit(1).merged) == 2


def test_who_leaves_sees_all_rounds(world: Any, looks: list[str]) -> None:
    *_, last = crowd(world)
    last.session._membership.state = "leaving"
    last.tick("syncer")
    assert looks == []
    assert last.engine.syncer.open_rounds == {(0, 1): frozenset("abcd")}


# --- groups --------------------------------------------------------------------------------------------


def in_group_order(nodes: list[Any], version: int) -> list[Any]:
    order = delegate_order(nodes[0].run.manifest.nonce, 0, version, {node.id: node.engine.publisher.uplink for node in nodes})
    return sorted(nodes, key=lambda node: order.index(node.id))


def test_two_of_a_group_look_and_others_where_those_do_not_contribute(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradientmail_torch.session.delegate.group_of", lambda *_: 0)
    monkeypatch.setattr("gradientmail_torch.session.partials.group_of", lambda *_: 0)
    nodes = crowd(world, "abcdef", fan_in=4, grace=2.0)
    nodes[0].until(lambda: world.commit(1), "syncer")
    adopt(nodes)
    in_order = in_group_order(nodes, 2)
    assert [place_in_group(node) for node in in_order] == [*range(6)]
    third = in_order[2]
    offer(in_order[2:])
    monkeypatch.setattr(Turns, "may_have_come", lambda *_: False)  # it is another's to merge
    began = third.clock.monotonic()
    third.until(lambda: meet(nodes) or world.keys("partials/"), "syncer")
    assert LEASE_S <= third.clock.monotonic() - began < 1.5 * LEASE_S
    assert read(world.mailbox, Partial, keys.partial(0, 2, 0)).by == third.id


def place_in_group(node: Any) -> int | None:
    place: int | None = node.engine.syncer._delegate.place(node.fragment, 2, node.engine._membership.peers)
    return place


# --- what is removed -----------------------------------------------------------------------------------


def test_each_removes_its_own_record_and_the_syncer_those_of_the_dead(world: Any) -> None:
    first, *others = crowd(world)
    dead = others.pop()
    for _ in range(int(2 * LEASE_S)):
        meet([first, *others])
        for node in (first, *others):
            node.clock.advance(1.0)
    assert dead.id not in first.engine._membership.live()
    first.tick("syncer")
    assert len(world.commit(1).merged) == 4
    assert world.keys("rounds/") == [keys.contribution(0, 1, node.id) for node in sorted(others, key=lambda node: node.id)]
    adopt(others)
    assert world.keys("rounds/") == []
    adopt([dead])  # it has only slept
    assert dead.fragment.version == 1


def test_where_everything_is_kept_records_are_as_well(world: Any) -> None:
    first, *others = crowd(world, keep=None)
    first.tick("syncer")
    adopt(others)
    assert len(world.keys("rounds/")) == 4
