"""Losses beyond a node's death: all nodes at once, objects that somebody deletes, a run that moves elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, OuterSGD
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Commit, read
from gradientmail_torch.session import align
from gradientmail_torch.session.run import Run

ALGORITHM = DecoupledDiLoCo(sync_every=4, fragments=1, grace=2.0, whole_every=4, outer=OuterSGD(lr=0.9, momentum=0.5))


class Vector(nn.Module):
    """Begins elsewhere in every process, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))


def train(world: Any, steps: int, *nodes: Any) -> None:
    for _ in range(steps):
        for node in nodes:
            node.train(0.125)
        world.turn()


def train_to(world: Any, version: int, *nodes: Any) -> None:
    """Until ``version`` is the newest, and every node has adopted it."""
    for _ in range(400):
        if min(node.fragment.version for node in nodes) >= version:
            return
        train(world, 1, *nodes)
    raise AssertionError(f"version {version} was never reached")


def start(world: Any, *names: str, mailbox: Mailbox | None = None, **settings: Any) -> list[Any]:
    nodes = [world.node(name, ALGORITHM, model=Vector(), mailbox=mailbox, **settings) for name in names]
    world.meet(*(node for node in world.nodes.values() if not node.session._closed))
    return nodes


def finish(*nodes: Any) -> list[float]:
    """All close; what each has done is in commits or counted, and all have the same parameters."""
    for node in nodes:
        node.session.close(timeout=200)
        stats = node.session.stats()
        assert stats.tally.merged_work.steps + stats.tally.discarded_work.steps == stats.steps
    values = []
    for node in nodes:
        align(node.model, mailbox=node.run.mailbox)
        values.append(node.w)
    assert all(value == values[0] for value in values)
    return list(values[0])


def crash(world: Any, *nodes: Any) -> None:
    """The machines are gone: nothing of theirs ever runs again."""
    for node in nodes:
        del world.nodes[node.id]


# --- every node ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_a_run_survives_the_loss_of_every_node_at_once(world: Any, tmp_path: Path, backend: str) -> None:
    box = open_mailbox(str(tmp_path / "run")) if backend == "file" else MemoryMailbox()
    nodes = start(world, "a", "b", "c", mailbox=box)
    train_to(world, 6, *nodes)
    train(world, 3, *nodes)
    for node in nodes:
        if node.fragment.pending is None:
            node.contribute()
        node.tick("publisher")
    newest = max(node.fragment.known for node in nodes)
    pending = {node.fragment.pending.nonce: node.fragment.pending.work.steps for node in nodes if node.fragment.pending}
    assert pending
    committed = nodes[0].run.newest(0)[1]
    crash(world, *nodes)

    again = start(world, "c", "a", "b", mailbox=box)
    assert [node.session._membership.life.generation for node in again] == [2, 2, 2]
    for node in again:
        assert node.fragment.version >= newest, "nothing committed is lost"
    assert torch.equal(again[0].run.newest(0)[1][0], committed[0]) or again[0].fragment.version > newest
    train(world, 20, *again)
    finish(*again)
    merged = {each.nonce for version in range(1, 200) if (found := box_commit(box, version)) for each in found.merged}
    assert pending.keys() <= merged, "what the dead had recorded counts"


def box_commit(box: Mailbox, version: int) -> Commit | None:
    return read(box, Commit, keys.commit(0, version))


def test_a_run_goes_on_from_the_mailbox_alone_under_new_names(world: Any) -> None:
    nodes = start(world, "a", "b")
    train_to(world, 6, *nodes)
    crash(world, *nodes)
    again = start(world, "x", "y")
    train_to(world, 8, *again)
    finish(*again)


# --- objects that somebody deletes -------------------------------------------------------------------


def forget_whole_values(world: Any, node: Any) -> None:
    """Those that have followed their commits, which a joiner reads first."""
    for version in range(1, node.fragment.known + 1):
        if (whole := node.run.committed(0, version).whole) is not None:
            world.mailbox.delete(whole.key)


def newest_data(part: str) -> Callable[[Run], str]:
    def find(run: Run) -> str:
        version = run.newest_version(0)
        return next(key for key in reversed(list(run.mailbox.list(keys.data_prefix(0)))) if key.endswith(part) and number(key) <= version)

    return find


def number(key: str) -> int:
    return keys.parse_round(key).version


def last_of(prefix: str) -> Callable[[Run], str]:
    return lambda run: list(run.mailbox.list(prefix))[-1]


GOES_ON: dict[str, Callable[[Run], str]] = {
    "the manifest": lambda run: keys.RUN,
    "an initial value": lambda run: run.manifest.initial[0].key,
    "a life": lambda run: keys.learner("a", 1),
    "a heartbeat": lambda run: keys.beat("b", 1),
    "an older commit": lambda run: keys.commit(0, 1),
    "an update that all have adopted": newest_data("update"),
    "a whole value that all have adopted": newest_data("whole"),
}


@pytest.mark.parametrize("what", GOES_ON)
def test_nodes_that_train_do_without(world: Any, what: str) -> None:
    nodes = start(world, "a", "b")
    train_to(world, 6, *nodes)
    key = GOES_ON[what](nodes[0].run)
    assert world.mailbox.get(key) is not None
    world.mailbox.delete(key)
    train_to(world, 12, *nodes)
    if what == "the manifest":
        world.put(keys.RUN, nodes[0].run.manifest)  # any node still has it
    finish(*nodes)


def test_a_record_that_is_deleted_from_the_open_round_is_made_again(world: Any) -> None:
    (a,) = start(world, "a")
    train_to(world, 2, a)
    a.contribute()
    a.tick("publisher")
    (key,) = world.keys(keys.round_prefix(0))
    world.mailbox.delete(key)
    train(world, 20, a)
    assert a.session.stats().tally.merged >= 3
    finish(a)


def test_contributed_data_that_is_deleted_is_offered_anew(world: Any) -> None:
    a, b = start(world, "a", "b")
    train_to(world, 2, a, b)
    a.train(0.125)
    a.contribute()
    a.tick("publisher")
    world.mailbox.delete(a.fragment.pending.record.data.key)
    train(world, 20, a, b)
    finish(a, b)
    assert a.session.stats().tally.discarded_work.steps == 0


def test_a_claim_that_is_deleted_is_made_again_by_another(world: Any) -> None:
    nodes = start(world, "a", "b")
    train(world, 6, *nodes)
    for _ in range(40):
        for key in world.keys("claims/"):
            world.mailbox.delete(key)
        train(world, 1, *nodes)
    assert nodes[0].fragment.version >= 4
    finish(*nodes)


def test_who_joins_a_run_whose_manifest_is_gone_is_told_so(world: Any) -> None:
    """Founding it anew would give other initial values under the same updates."""
    a, b = start(world, "a", "b")
    train_to(world, 2, a, b)
    world.mailbox.delete(keys.RUN)
    with pytest.raises(CorruptObject, match=r"run\.json.*deleted: restore it"):
        start(world, "c")


@pytest.mark.parametrize("version", [2, 6])
def test_who_joins_a_run_whose_initial_value_is_gone_needs_it_only_before_the_first_whole_value(world: Any, version: int) -> None:
    a, b = start(world, "a", "b")
    train_to(world, version, a, b)
    key = a.run.manifest.initial[0].key
    world.mailbox.delete(key)
    forget_whole_values(world, a)
    if version < ALGORITHM.whole_every:
        with pytest.raises(CorruptObject, match=key):
            start(world, "c")
    else:
        (c,) = start(world, "c")
        finish(a, b, c)


@pytest.mark.parametrize("part", ["update", "whole"])
def test_who_joins_a_run_whose_committed_data_is_gone_is_told_which(world: Any, part: str) -> None:
    a, b = start(world, "a", "b")
    train_to(world, 6, a, b)
    forget_whole_values(world, a)
    key = newest_data(part)(a.run)
    world.mailbox.delete(key)
    with pytest.raises(CorruptObject, match=key):
        start(world, "c")


def test_who_joins_a_run_that_has_lost_an_update_or_its_initial_value_reads_the_whole_value_that_followed(world: Any) -> None:
    a, b = start(world, "a", "b")
    train_to(world, 3, a, b)
    a.until(lambda: world.mailbox.get(a.run.committed(0, a.fragment.known).whole.key) is not None, "whole-writer")
    world.mailbox.delete(newest_data("update")(a.run))
    world.mailbox.delete(a.run.manifest.initial[0].key)
    (c,) = start(world, "c")
    finish(a, b, c)


def test_a_follower_that_misses_committed_data_is_told_which(world: Any) -> None:
    a, b = start(world, "a", "b")
    train_to(world, 5, a, b)
    version = a.fragment.known + 1
    while a.fragment.known < version:  # b sleeps
        a.train(0.125)
        a.tick()
        a.clock.advance(1.0)
    key = newest_data("update")(a.run)
    world.mailbox.delete(key)
    with pytest.raises(CorruptObject, match=key):
        train(world, 5, b)


def test_outer_state_that_is_deleted_is_named(world: Any) -> None:
    nodes = start(world, "a", "b")
    train_to(world, 6, *nodes)
    key = newest_data("outer")(nodes[0].run)
    world.mailbox.delete(key)
    with pytest.raises(CorruptObject, match=key):
        train_to(world, 12, *nodes)


def test_the_newest_commit_that_is_deleted_is_missed_at_the_latest_when_the_next_one_follows(world: Any) -> None:
    """Who joins without it may create it again; that the two differ must not go unseen."""
    a, b = start(world, "a", "b")
    train_to(world, 6, a, b)
    newest = a.fragment.known
    world.mailbox.delete(keys.commit(0, newest))
    (c,) = start(world, "c")
    with pytest.raises(CorruptObject, match=r"commits/0000/\d+.*commits must never be deleted"):
        train(world, 100, a, b, c)


# --- elsewhere -----------------------------------------------------------------------------------------


def test_a_directory_can_be_copied_and_the_run_goes_on_there(world: Any, tmp_path: Path) -> None:
    here = start(world, "a", "b", mailbox=open_mailbox(str(tmp_path / "here")))
    train_to(world, 6, *here)
    for node in here:
        node.session.close(timeout=200)
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    shutil.rmtree(tmp_path / "here")
    there = start(world, "a", "c", mailbox=open_mailbox(str(tmp_path / "there")))
    train_to(world, 12, *there)
    finish(*there)


@pytest.mark.s3
@pytest.mark.parametrize("signed", [False, True])
def test_a_prefix_can_be_copied_to_another_place_and_opened_there(
    world: Any, s3_url: str, tmp_path: Path, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if signed:
        monkeypatch.setenv("GRADIENTMAIL_RUN_KEY", "a secret of the run, long enough")
    here = start(world, "a", "b", mailbox=open_mailbox(s3_url))
    train_to(world, 2, *here)
    finished = finish(*here)
    monkeypatch.delenv("GRADIENTMAIL_RUN_KEY", raising=False)
    source, moved, folder = open_mailbox(s3_url), open_mailbox(s3_url.replace("?", "/moved?")), open_mailbox(str(tmp_path / "copy"))
    for key in list(source.list("")):
        moved.put(key, source.get(key) or b"")
        folder.put(key, source.get(key) or b"")
    if signed:
        monkeypatch.setenv("GRADIENTMAIL_RUN_KEY", "a secret of the run, long enough")
    for url in (s3_url.replace("?", "/moved?"), str(tmp_path / "copy")):
        model = Vector()
        align(model, mailbox=url)
        assert model.w.tolist() == finished
        (node,) = start(world, "b", mailbox=open_mailbox(url))
        train_to(world, node.fragment.version + 1, node)
        finish(node)
