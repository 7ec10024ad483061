"""New commits on their way into memory: few requests, no version twice, none that is gone waited for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.session.aligner import ASKED_AT_EACH_LOOK
from gradientmail_torch.testing.faults import Interposed

FP32 = DecoupledDiLoCo(sync_every=1000, fragments=1, wire="fp32", commit_wire="fp32", grace=0.0)
UPDATES = DecoupledDiLoCo(sync_every=1000, fragments=1, wire="fp32", commit_wire="bf16", whole_every=4, grace=0.0)


class Log(Interposed):
    """What is asked of the store."""

    def __init__(self, inner: MemoryMailbox) -> None:
        super().__init__(inner)
        self.requests: list[str] = []

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
        self.requests.append(f"{operation} {key}")
        return carry_out()


def commits(node: Any, count: int, change: float = 1.0) -> None:
    """``node`` moves the run on by ``count`` versions, alone."""
    for _ in range(count):
        version = node.fragment.known + 1
        node.train(change)
        node.contribute()
        node.tick("publisher")
        node.until(lambda version=version: node.fragment.known >= version, "syncer", "aligner")
        node.boundary()
    node.tick("heartbeat")


@pytest.fixture
def log(mailbox: MemoryMailbox) -> Log:
    return Log(mailbox)


def test_with_nothing_on_its_way_and_nothing_said_nothing_is_asked(world: Any, log: Log) -> None:
    a = world.node("a", FP32, mailbox=log)
    log.requests.clear()
    a.tick("aligner")
    assert log.requests == []


def test_the_commit_of_a_contribution_on_its_way_is_asked_for_by_its_key_and_never_listed(world: Any, log: Log) -> None:
    a = world.node("a", FP32, mailbox=log)
    a.train()
    a.contribute()
    a.tick("aligner")
    a.tick("publisher")
    log.requests.clear()
    a.tick("aligner")
    a.tick("aligner")
    assert log.requests == [f"get {keys.commit(0, 1)}"] * 2


def test_a_learner_that_is_one_version_behind_reads_the_commit_and_its_data(world: Any, log: Log) -> None:
    a, b = world.node("a", FP32, mailbox=log), world.node("b", FP32)
    commits(b, 1)
    a.tick("observer")
    log.requests.clear()
    a.tick("aligner")
    parameters = world.commit(1).parameters
    assert log.requests == [f"get {keys.commit(0, 1)}", f"get {parameters.key}"]
    assert a.session._attention, "the training thread is told"


@pytest.mark.parametrize("algorithm", [FP32, UPDATES], ids=["whole", "updates"])
def test_a_learner_that_is_far_behind_comes_to_the_newest_version_at_once(world: Any, algorithm: DecoupledDiLoCo) -> None:
    a, b = world.node("a", algorithm), world.node("b", algorithm)
    commits(b, 9)
    a.tick("observer", "aligner")
    a.boundary()
    assert a.fragment.version == 9
    assert a.w == b.w == [9.0, 9.0]


def test_a_wrong_hint_costs_a_request_and_nothing_else(world: Any, log: Log) -> None:
    a = world.node("a", FP32, mailbox=log)
    a.fragment.hint = 10**9
    log.requests.clear()
    a.tick("aligner")
    assert log.requests == [f"get {keys.commit(0, 1)}"]
    assert a.fragment.known == 0


@pytest.mark.parametrize("algorithm", [FP32, UPDATES], ids=["whole", "updates"])
def test_data_that_retention_has_removed_is_not_needed(world: Any, algorithm: DecoupledDiLoCo) -> None:
    a, b = world.node("a", algorithm), world.node("b", algorithm, keep=1, keep_seconds=0.0)
    commits(b, 9)
    a.fragment.hint = 1  # it has heard of the first version alone
    assert world.mailbox.get((world.commit(1).parameters or world.commit(1).update).key) is None
    a.tick("aligner")
    a.boundary()
    assert a.w == [9.0, 9.0]


def test_retention_that_passes_between_the_record_and_its_data_is_caught_up_with(world: Any, mailbox: MemoryMailbox) -> None:
    """The reader holds commit 1 when its data goes."""

    class Sweeping(Interposed):
        def get(self, key: str, **window: Any) -> bytes | None:
            if key.startswith(keys.data_prefix(0)) and b.fragment.version == 1:
                commits(b, 3)
            return super().get(key, **window)

    a = world.node("a", FP32, mailbox=Sweeping(mailbox))
    b = world.node("b", FP32, keep=1, keep_seconds=0.0)
    commits(b, 1)
    a.tick("observer", "aligner")
    a.boundary()
    assert a.fragment.version == 4
    assert a.w == b.w


def test_data_of_the_newest_commit_that_is_gone_is_named_with_the_cure(world: Any) -> None:
    a, b = world.node("a", FP32), world.node("b", FP32)
    commits(b, 1)
    world.mailbox.delete(world.commit(1).parameters.key)
    a.tick("observer")
    with pytest.raises(CorruptObject, match=r"fragment 0.*version 1.*restore"):
        a.tick("aligner")


def test_a_commit_that_somebody_has_deleted_is_named_and_not_waited_for(world: Any) -> None:
    a, b = world.node("a", FP32), world.node("b", FP32)
    a.train()
    a.contribute()
    a.tick("publisher")
    b.merge(1)
    b.tick("aligner")
    b.boundary()
    commits(b, 2)
    record = world.mailbox.get(keys.commit(0, 1))
    a.tick("observer")

    class Deleting(Interposed):
        def get(self, key: str, **window: Any) -> bytes | None:
            found = super().get(key, **window)
            if key == keys.commit(0, 1):
                self.inner.delete(key)
            return found

    a.run.mailbox = Deleting(world.mailbox)
    with pytest.raises(CorruptObject, match=r"commits/0000/0000000001.*never be deleted"):
        a.tick("aligner")
    world.mailbox.put(keys.commit(0, 1), record)
    a.run.mailbox = world.mailbox
    a.tick("aligner")
    a.boundary()
    assert a.w == [3.0, 3.0]


@pytest.mark.parametrize("algorithm", [FP32, UPDATES], ids=["whole", "updates"])
def test_all_who_adopt_a_version_have_the_same_bits_whichever_way_they_came(world: Any, algorithm: DecoupledDiLoCo) -> None:
    """One by one, at a jump, as the one who merged, and as one who joins."""
    a, b, late = world.node("a", algorithm), world.node("b", algorithm), world.node("late", algorithm)
    for _ in range(7):
        commits(b, 1, 0.1234567)
        a.tick("observer", "aligner")
        a.boundary()
    late.tick("observer", "aligner")
    late.boundary()
    joiner = world.node("joiner", algorithm)
    assert a.fragment.version == late.fragment.version == joiner.fragment.version == 7
    assert len({tuple(node.fragment.values[0].tolist()) for node in (a, b, late, joiner)}) == 1


def test_a_commit_read_after_a_newer_one_changes_nothing(world: Any) -> None:
    a, b = world.node("a", FP32), world.node("b", FP32)
    commits(b, 1)
    old = world.commit(1)
    values = a.run.values(old)
    commits(b, 1)
    a.tick("observer", "aligner")
    a.engine.aligner.accept(a.fragment, old, values)
    a.boundary()
    assert a.fragment.version == 2
    assert a.w == [2.0, 2.0]


class Many(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(2) for _ in range(parameters))


@pytest.mark.parametrize(("fragments", "most"), [(ASKED_AT_EACH_LOOK, 301), (ASKED_AT_EACH_LOOK + 1, 50)])
def test_commits_that_are_long_in_coming_are_asked_for_less_often_where_they_are_many(
    world: Any, log: Log, fragments: int, most: int
) -> None:
    algorithm = dataclasses.replace(FP32, fragments=fragments)
    a = world.node("a", algorithm, mailbox=log, model=Many(fragments))
    a.session.count(8)
    for fragment in a.session._replica.fragments:
        a.session._replica.contribute(fragment, f"{fragment.index:032x}")
    a.tick("publisher", "aligner")
    log.requests.clear()
    for _ in range(300):
        a.clock.advance(1.0)
        a.tick("aligner")
    asked = log.requests.count(f"get {keys.commit(0, 1)}")
    assert 0.6 * most < asked < most
    a.fragment.hint = 1
    a.tick("aligner")
    assert log.requests.count(f"get {keys.commit(0, 1)}") == asked + 1, "at once when it is heard of"
