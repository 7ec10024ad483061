"""Whole values that follow their commits: what a joiner downloads, and that nothing depends on them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Commit
from gradientmail_torch.session import align
from gradientmail_torch.testing.faults import Interposed

SIZE = 20_000
MODEL_BYTES = 4 * SIZE


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))


def node(world: Any, learner_id: str = "a", *, commit_wire: str = "bf16", **settings: Any) -> Any:
    algorithm = DecoupledDiLoCo(sync_every=1000, fragments=1, commit_wire=commit_wire, whole_every=4, grace=0.0)
    return world.node(learner_id, algorithm, model=Model(), **settings)


def commit(node: Any, *workers: str) -> Commit:
    """The node makes a version alone; then ``workers`` tick."""
    version = node.fragment.known + 1
    node.train(0.1 * version)
    node.contribute()
    node.tick("publisher")
    made = node.merge(version)
    node.until(lambda: node.fragment.known >= version, "aligner")
    node.boundary()
    node.tick(*workers) if workers else None
    node.clock.advance(100.0)
    return made


def joined(world: Any, learner_id: str) -> tuple[Any, float]:
    """A newcomer, and how many models it has downloaded."""
    newcomer = node(world, learner_id)
    return newcomer, newcomer.session.stats().usage.bytes_down / MODEL_BYTES


def test_who_joins_where_commits_flow_downloads_one_model(world: Any) -> None:
    a = node(world)
    for version in range(1, 9):
        commit(a, "whole-writer")
        newcomer, models = joined(world, f"b{version}")
        assert newcomer.session.versions == (version,)
        assert torch.equal(newcomer.fragment.values[0], a.fragment.values[0])
        assert models <= 1.1


def test_where_the_author_died_before_it_wrote_the_value_it_is_made_of_the_updates(world: Any) -> None:
    a = node(world)
    for version in range(1, 8):
        made = commit(a)
        assert (made.whole is None) == (version % 4 == 0)
        assert made.whole is None or world.mailbox.get(made.whole.key) is None
        newcomer, models = joined(world, f"b{version}")
        assert torch.equal(newcomer.fragment.values[0], a.fragment.values[0])
        assert models <= 1.1 + 0.5 * (version % 4)


def test_the_newest_value_that_is_there_is_read_and_only_the_updates_since(world: Any) -> None:
    a = node(world)
    commit(a)
    commit(a, "whole-writer")
    commit(a)
    newcomer, models = joined(world, "b")
    assert torch.equal(newcomer.fragment.values[0], a.fragment.values[0])
    assert 1.4 <= models <= 1.6


@pytest.mark.parametrize("change", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-7], lambda data: b""])
def test_another_object_in_its_place_is_refused_and_the_updates_are_read(world: Any, caplog: pytest.LogCaptureFixture, change: Any) -> None:
    a = node(world)
    whole = commit(a, "whole-writer").whole
    assert whole is not None
    world.mailbox.put(whole.key, change(world.mailbox.get(whole.key)))
    with caplog.at_level(logging.WARNING):
        newcomer, _ = joined(world, "b")
    assert torch.equal(newcomer.fragment.values[0], a.fragment.values[0])
    assert "made of its updates instead" in caplog.text


def test_who_is_a_version_behind_reads_the_update_and_no_whole_value(world: Any) -> None:
    a, b = node(world), node(world, "b")
    before = b.session.stats().usage.bytes_down
    commit(a, "whole-writer", "heartbeat")
    b.until(lambda: b.fragment.known == 1, "observer", "aligner")
    assert (b.session.stats().usage.bytes_down - before) / MODEL_BYTES <= 0.6


@pytest.mark.parametrize(("behind", "models"), [(2, 1.1), (3, 1.1), (7, 1.1)])
def test_who_is_far_behind_reads_what_is_less_to_download(world: Any, behind: int, models: float) -> None:
    a, b = node(world, keep=None), node(world, "b", keep=None)
    for _ in range(behind):
        commit(a, "whole-writer", "heartbeat")
    before = b.session.stats().usage.bytes_down
    b.until(lambda: b.fragment.known == behind, "observer", "aligner")
    assert (b.session.stats().usage.bytes_down - before) / MODEL_BYTES <= models
    assert torch.equal(b.fragment.staged.values[0], a.fragment.values[0])


def test_of_int4_updates_many_are_less_than_one_whole_value(world: Any) -> None:
    a, b = node(world, commit_wire="int4"), node(world, "b", commit_wire="int4")
    for _ in range(6):
        commit(a, "whole-writer", "heartbeat")
    before = b.session.stats().usage.bytes_down
    b.until(lambda: b.fragment.known == 6, "observer", "aligner")
    assert (b.session.stats().usage.bytes_down - before) / MODEL_BYTES <= 0.9
    assert torch.equal(b.fragment.staged.values[0], a.fragment.values[0])


def test_where_commits_are_whole_nothing_follows_them(world: Any) -> None:
    a = node(world, commit_wire="fp32")
    assert commit(a, "whole-writer").whole is None
    assert len([key for key in world.keys("data/") if keys.is_whole(key)]) == 1


# --- when it is written ----------------------------------------------------------------------------------


class Slow(Interposed):
    """An uplink of ``rate`` bytes per second."""

    def __init__(self, inner: Mailbox, rate: float) -> None:
        super().__init__(inner)
        self.rate = rate
        self.clock: Any = None

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
        if self.clock is not None:
            self.clock.advance(bytes_up / self.rate)
        return carry_out()


def wholes(world: Any) -> set[int]:
    return {keys.parse_round(key).version for key in world.keys("data/") if keys.is_whole(key)}


def test_a_slow_uplink_gives_an_eighth_of_its_time(world: Any) -> None:
    """A whole value takes 50 seconds here, and 100 pass besides from commit to commit."""
    slow = Slow(world.mailbox, MODEL_BYTES / 50)
    a = node(world, mailbox=slow, keep=None)
    slow.clock = a.clock
    for _ in range(24):
        commit(a, "whole-writer")
    followed = {version for version in wholes(world) if version % 4}
    spent_s, passed_s = 50 * len(followed), a.clock.monotonic() - 1000.0
    assert passed_s / 8 - 2 * 50 <= spent_s <= passed_s / 8


def test_contributions_go_first(world: Any) -> None:
    a = node(world)
    made = commit(a)
    a.train(1.0)
    a.contribute()
    a.tick("whole-writer")
    assert world.mailbox.get(made.whole.key) is None
    a.tick("publisher", "whole-writer")
    assert world.mailbox.get(made.whole.key) is not None


def test_a_value_that_has_been_superseded_is_not_written(world: Any) -> None:
    a = node(world)
    first = commit(a)
    second = commit(a)
    a.tick("whole-writer")
    assert [world.mailbox.get(made.whole.key) is not None for made in (first, second)] == [False, True]


# --- what stays --------------------------------------------------------------------------------------------


def test_superseded_values_go_and_those_within_keep_stay(world: Any) -> None:
    a = node(world, keep=2, keep_seconds=0.0)
    for version in range(1, 14):
        commit(a, "whole-writer")
        assert wholes(world) >= set(range(max(1, version - 1), version + 1)), "those of the versions that are kept"
        assert len(wholes(world)) <= 5, "a sweep comes with every second version; one that the others are built on stays"
    last = Model()
    assert align(last, mailbox=world.mailbox) == (13,)
    assert torch.equal(last.w.detach(), a.fragment.values[0])


def test_the_value_that_the_versions_kept_are_built_on_stays_though_others_were_promised(world: Any) -> None:
    a = node(world, keep=1, keep_seconds=0.0)
    for version in range(1, 14):
        commit(a)
        newest = Model()
        assert align(newest, mailbox=world.mailbox) == (version,)
        assert torch.equal(newest.w.detach(), a.fragment.values[0])


# --- who joins while versions come and go ----------------------------------------------------------------


class Busy(Interposed):
    """While the store answers a reader, the run goes on."""

    def __init__(self, inner: Mailbox, go_on: Any, *, requests: int, first: bool) -> None:
        super().__init__(inner)
        self.go_on, self.left, self.first = go_on, requests, first

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Any) -> Any:
        if not (operation in ("get", "list") and key.startswith(("data/", "commits/")) and self.left):
            return carry_out()
        self.left -= 1
        if self.first:
            self.go_on()
        found = carry_out()
        if not self.first:
            self.go_on()
        return found


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("workers", [("whole-writer",), ()], ids=["written", "promised"])
@pytest.mark.parametrize(("lead", "at_a_time"), [(0, 1), (2, 1), (3, 2), (4, 5)])
def test_who_joins_while_each_request_finds_other_versions_joins_at_one_of_them(
    world: Any, lead: int, at_a_time: int, workers: tuple[str, ...], first: bool
) -> None:
    """The value it is about to read may be written, or retired, in between."""
    a = node(world, keep=1, keep_seconds=0.0)
    values: dict[int, torch.Tensor] = {0: a.fragment.values[0]}

    def go_on(versions: int = at_a_time) -> None:
        for _ in range(versions):
            commit(a, *workers)
            values[a.fragment.known] = a.fragment.values[0]

    go_on(lead)
    joined = node(world, "b", mailbox=Busy(world.mailbox, go_on, requests=8, first=first), keep=1, keep_seconds=0.0)
    assert torch.equal(joined.fragment.values[0], values[joined.session.versions[0]])
    model = Model()
    (version,) = align(model, mailbox=Busy(world.mailbox, go_on, requests=8, first=first))
    assert torch.equal(model.w.detach(), values[version])
