"""What is removed from a run, and what never is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, OuterSGD
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Claim, encode
from gradientmail_torch.session import align
from gradientmail_torch.testing.faults import Interposed


def algorithm(**changes: Any) -> DecoupledDiLoCo:
    return DecoupledDiLoCo(**{"sync_every": 1000, "fragments": 1, "wire": "fp32", "commit_wire": "fp32", "grace": 0.0} | changes)


def versions(world: Any, node: Any, count: int, *, seconds: float = 1.0) -> None:
    """``node`` makes ``count`` versions, alone, ``seconds`` apart."""
    for _ in range(count):
        version = node.fragment.known + 1
        node.train(1.0)
        node.contribute()
        node.tick("publisher")
        node.until(lambda version=version: node.fragment.known >= version, "syncer", "aligner")
        node.boundary()
        node.clock.advance(seconds)
    node.tick("heartbeat")


def data_versions(world: Any) -> set[int]:
    return {keys.parse_round(key).version for key in world.keys("data/")}


def test_data_goes_when_it_is_old_by_versions_and_by_seconds(world: Any) -> None:
    a = world.node("a", algorithm(), keep=2, keep_seconds=20.0)
    versions(world, a, 6)
    assert data_versions(world) == {1, 2, 3, 4, 5, 6}, "not old enough"
    a.clock.advance(20.0)
    versions(world, a, 2)
    assert data_versions(world) == {6, 7, 8}


def test_records_of_commits_stay_for_ever_and_so_does_the_initial_value(world: Any) -> None:
    a = world.node("a", algorithm(), keep=1, keep_seconds=0.0)
    versions(world, a, 8)
    assert len(world.keys("commits/")) == 8
    assert len(world.keys("init/")) == 1
    assert world.keys("rounds/") == []
    assert {keys.parse_round(key).version for key in world.keys("claims/")} == {8}


def test_where_everything_is_kept_nothing_is_removed(world: Any) -> None:
    a = world.node("a", algorithm(), keep=None, keep_seconds=0.0)
    versions(world, a, 6, seconds=1000.0)
    assert data_versions(world) == {1, 2, 3, 4, 5, 6}
    assert len(world.keys("rounds/")) == 6


def test_what_the_dead_and_the_late_have_left_is_removed_as_well(world: Any) -> None:
    a = world.node("a", algorithm(), keep=1, keep_seconds=0.0)
    versions(world, a, 2)
    left = [keys.data(0, 1, "dead", "0" * 32, "delta"), keys.data(0, 2, "dead", "1" * 32, "whole"), keys.contribution(0, 1, "dead")]
    for key in left:
        world.mailbox.put(key, b"?")
    world.put(keys.claim(0, 1, 9), Claim(nonce="0" * 32, learner_id="dead", generation=1))
    versions(world, a, 3)
    assert not [key for key in (*left, keys.claim(0, 1, 9)) if world.mailbox.get(key) is not None]


def test_strangers_objects_are_left_alone(world: Any) -> None:
    a = world.node("a", algorithm(), keep=1, keep_seconds=0.0)
    for key in ("data/0000/.DS_Store", "data/readme", "rounds/0000/notes"):
        world.mailbox.put(key, b"mine")
    versions(world, a, 5)
    for key in ("data/0000/.DS_Store", "data/readme", "rounds/0000/notes"):
        assert world.mailbox.get(key) == b"mine"


class During(Interposed):
    """Something happens at the first request of a kind."""

    def __init__(self, inner: MemoryMailbox, when: Callable[[str, str], bool], what: Callable[[], object]) -> None:
        super().__init__(inner)
        self._when, self._what = when, what

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
        if self._when(operation, key):
            self._when = lambda operation, key: False
            self._what()
        return carry_out()


@pytest.mark.parametrize("listed", ["data/0000/", "claims/0000/", "rounds/0000/"])
def test_data_that_a_record_in_an_open_round_names_stays_however_old_and_however_late_the_record(world: Any, listed: str) -> None:
    """Its upload took longer than many rounds; the record is made while the sweep looks around."""
    a, slow = world.node("a", algorithm(), keep=1, keep_seconds=0.0), world.node("slow", algorithm())
    slow.train(100.0)
    slow.contribute()
    slow.tick("publisher")
    record, mailbox = world.record(1, "slow"), world.mailbox
    mailbox.delete(keys.contribution(0, 1, "slow"))
    a.run.mailbox = During(
        mailbox,
        lambda operation, key: operation == "list" and key == listed and a.fragment.known >= 3,
        lambda: mailbox.put_if_absent(keys.contribution(0, 4, "slow"), encode(record)),
    )
    data = mailbox.get(record.data.key)
    versions(world, a, 3)
    assert mailbox.get(world.commit(1).parameters.key) is None, "it has been swept"
    assert mailbox.get(record.data.key) == data


def test_a_contribution_whose_record_is_still_to_be_made_stays_while_its_learner_lives(world: Any) -> None:
    """Simulated training, seed 414: the upload had taken many rounds, and a sweep came before the record."""
    a, slow = world.node("a", algorithm(), keep=1, keep_seconds=0.0), world.node("slow", algorithm())
    world.meet()
    slow.train(100.0)
    slow.contribute()
    slow.tick("publisher")
    record = world.record(1, "slow")
    world.mailbox.delete(keys.contribution(0, 1, "slow"))
    versions(world, a, 4)
    assert world.mailbox.get(world.commit(1).parameters.key) is None, "it has been swept"
    assert world.mailbox.get(record.data.key) is not None
    slow.clock.advance(1000.0)
    for _ in range(10):
        a.tick("observer")
        a.clock.advance(5.0)
    versions(world, a, 2)
    assert world.mailbox.get(record.data.key) is None, "its learner has died"


@pytest.mark.parametrize("keep", [1, 2, 5])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_every_version_that_is_kept_can_be_read_and_a_learner_joins_at_any_time(world: Any, keep: int, wire: str) -> None:
    a = world.node("a", algorithm(commit_wire=wire, whole_every=4, outer=OuterSGD(lr=1.0, momentum=0.5)), keep=keep, keep_seconds=0.0)
    for newest in range(1, 14):
        versions(world, a, 1)
        for version in range(max(1, newest - keep + 1), newest + 1):
            assert a.run.values(world.commit(version)) is not None, f"version {version} at {newest}"
        assert a.run.outer_state(world.commit(newest)) is not None
        model = type(a.model)()
        assert align(model, mailbox=world.mailbox) == (newest,)
        assert model.w.tolist() == a.fragment.values[0].tolist()


def test_a_sweep_of_one_fragment_leaves_the_others_alone(world: Any) -> None:
    a = world.node("a", algorithm(), keep=1, keep_seconds=0.0)
    other = keys.data(1, 1, "a", "0" * 32, "whole")
    world.mailbox.put(other, b"?")
    versions(world, a, 4)
    assert world.mailbox.get(other) == b"?"


def test_age_is_what_the_sweeper_itself_has_seen(world: Any) -> None:
    """A newcomer does not take for old what it has just found."""
    a = world.node("a", algorithm(), keep=1, keep_seconds=1000.0)
    versions(world, a, 6)
    newcomer = world.node("b", algorithm(), keep=1, keep_seconds=10.0)
    versions(world, newcomer, 2, seconds=1.0)
    assert data_versions(world) == {1, 2, 3, 4, 5, 6, 7, 8}
    newcomer.clock.advance(20.0)
    versions(world, newcomer, 1)
    assert data_versions(world) == {6, 8, 9}, "a lives, and version 6 is that of its newest contribution"
