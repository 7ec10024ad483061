"""Rounds of which groups are summed ahead: everyone counts once, whoever dies, sleeps, comes late or lies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, wire
from gradientmail_torch.algorithms.merge import Weighted, merge
from gradientmail_torch.algorithms.quorum import delegate_order, group_of, groups_ahead
from gradientmail_torch.cli.verify import verify
from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.messages import Commit, Partial, encode, read, reference
from gradientmail_torch.session.observer import UNREAD, Peer
from gradientmail_torch.session.run import Run
from gradientmail_torch.testing.faults import Crash, CrashAfter, CrashBefore, Interposed

SIZE = 64
NAMES = "abcdefgh"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE))


def crowd(world: Any, names: str = NAMES, **settings: Any) -> list[Any]:
    """Learners that have all been in the first commit, and know each other since."""
    nodes = strangers(world, names, **settings)
    offer(*nodes)
    commit(world, nodes, 1)
    meet(nodes)
    return nodes


def strangers(world: Any, names: str, *, fan_in: int = 3, keep: int | None = None, size: int = SIZE, **changes: Any) -> list[Any]:
    algorithm = DecoupledDiLoCo(
        **{"sync_every": 1000, "fragments": 1, "wire": "fp32", "commit_wire": "fp32", "grace": 0.0, "fan_in": fan_in} | changes
    )
    nodes = []
    for name in names:
        model = Model()
        model.w = nn.Parameter(torch.zeros(size))
        nodes.append(world.node(name, algorithm, model=model, keep=keep, keep_seconds=0.0))
    return nodes


def meet(nodes: list[Any]) -> None:
    for worker in ("heartbeat", "observer"):
        for node in nodes:
            node.tick(worker)


def offer(*nodes: Any) -> None:
    """Each a direction of its own."""
    for node in nodes:
        number = ord(node.id)
        with torch.no_grad():
            node.model.w.add_(torch.sin(torch.arange(float(len(node.model.w))) * number) + 0.5)
        node.session.step(samples=1 + number % 3)
        node.contribute()
        node.tick("publisher")


def commit(world: Any, nodes: list[Any], version: int, *, but: Any = None) -> Commit:
    """Syncers tick until the round is committed; then all adopt."""
    for _ in range(100):
        for node in nodes:
            if node is not but and world.commit(version) is None:
                node.tick("syncer")
            node.clock.advance(1.0)
        if world.commit(version) is not None:
            break
    for node in nodes:
        if node is not but:
            node.until(lambda node=node: node.fragment.known >= version, "aligner")
            node.boundary()
    made: Commit | None = world.commit(version)
    assert made is not None
    return made


def groups(world: Any, nodes: list[Any], *, count: int = 0) -> dict[int, list[str]]:
    """The members of each group that is worth a sum."""
    run, count = nodes[0].run.manifest.nonce, count or groups_ahead(len(nodes), nodes[0].session.algorithm.fan_in)
    found: dict[int, list[str]] = {}
    for node in nodes:
        found.setdefault(group_of(run, node.id, count), []).append(node.id)
    return {group: members for group, members in found.items() if len(members) > 1}


def check(world: Any, nodes: list[Any], made: Commit) -> None:
    """Everyone is in it once, with the value that a flat merge gives, and all have adopted the same."""
    assert Counter(merged.learner_id for merged in made.merged) == Counter(node.id for node in nodes)
    run, specs = nodes[0].run, nodes[0].fragment.specs
    parts = []
    for merged in sorted(made.merged, key=lambda each: each.nonce):
        tensors = run.tensors(merged.data, specs)
        parts.append(Weighted(weight=merged.weight, tensors=tensors, norms=[float(tensors[0].norm())]))
    (change,) = merge(lambda: iter(parts), specs, made.method)
    before = run.values(world.commit(made.version - 1))[0]
    after = run.values(made)[0]
    torch.testing.assert_close(after, before + change, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(node.fragment.values[0], after) for node in nodes)
    found = verify(world.mailbox, tuple(world.commit(version) for version in range(1, made.version + 1)))
    assert [(each.problem, each.commits) for each in found] == [("", made.version)]


def partials(world: Any) -> list[str]:
    return [key for key in world.keys("") if key.startswith("partials/") or keys.is_partial(key)]


# --- all is well -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"merge": "mean"}, {"merge": "rda"}, {"wire": "bf16", "commit_wire": "bf16"}], ids=str)
def test_groups_are_summed_ahead_and_the_commit_is_that_of_a_flat_merge(world: Any, changes: dict[str, Any]) -> None:
    nodes = crowd(world, **changes)
    for version in (2, 3):
        offer(*nodes)
        made = commit(world, nodes, version)
        sums = {tuple(sorted(m.learner_id for m in made.merged[a:b])) for a, b in slices(made)}
        assert sums == {tuple(members) for members in groups(world, nodes).values()}
        if "commit_wire" not in changes:
            check(world, nodes, made)


def test_a_first_round_is_grouped_by_those_who_train(world: Any) -> None:
    nodes = strangers(world, NAMES)
    meet(nodes)
    offer(*nodes)
    made = commit(world, nodes, 1)
    sums = {tuple(sorted(m.learner_id for m in made.merged[a:b])) for a, b in slices(made)}
    assert sums == {tuple(members) for members in groups(world, nodes, count=4).values()}
    assert sorted(merged.learner_id for merged in made.merged) == list(NAMES)


def test_where_many_have_come_the_round_is_grouped_by_those_who_train(world: Any) -> None:
    few = crowd(world, NAMES[:2])
    many = [*few, *strangers(world, NAMES[2:])]
    meet(many)
    offer(*many)
    assert commit(world, many, 2).ahead


@pytest.mark.parametrize("seen", [6, 16])
def test_a_first_round_is_right_where_the_delegates_saw_fewer_or_more_than_the_syncer(world: Any, seen: int) -> None:
    nodes = strangers(world, NAMES)
    meet(nodes)
    offer(*nodes)
    for node in nodes:
        node.engine.syncer._delegate.consider(node.fragment, 1, frozenset(NAMES), seen_by(node, seen), waited_enough=True)
    # Whether there are sums depends on the groups, which are drawn with the run: of six that see six, none may be a delegate.
    made = commit(world, nodes, 1)
    assert sorted(merged.learner_id for merged in made.merged) == list(NAMES)


def seen_by(node: Any, count: int) -> dict[str, Peer]:
    """So many others, some of whom may not be there."""
    known = dict(sorted(node.session._membership.peers.items())[:count])
    return known | {f"more-{number}": Peer(f"more-{number}", 1, UNREAD, live=True) for number in range(count - len(known))}


def slices(made: Commit) -> list[tuple[int, int]]:
    begin, found = 0, []
    for ahead in made.ahead:
        found.append((begin, begin + ahead.contributions))
        begin += ahead.contributions
    return found


def test_a_replay_names_the_sum_that_is_not_what_its_contributions_make(world: Any) -> None:
    nodes = crowd(world)
    offer(*nodes)
    made = commit(world, nodes, 2)
    first, *others = made.ahead
    lie = msgspec.structs.replace(first, data=msgspec.structs.replace(first.data, sha256="0" * 64))
    (found,) = verify(world.mailbox, (world.commit(1), msgspec.structs.replace(made, ahead=(lie, *others))))
    assert f"the sums by {first.by} of version 2" in found.problem


def test_up_to_the_fan_in_nothing_is_summed_ahead(world: Any) -> None:
    nodes = crowd(world, fan_in=8)
    offer(*nodes)
    made = commit(world, nodes, 2)
    assert made.ahead == ()
    assert not partials(world)
    check(world, nodes, made)


def test_a_syncer_downloads_the_sums_and_not_the_contributions(world: Any) -> None:
    nodes = crowd(world, "abcdefghijklmnopqrstuvwx", fan_in=6, size=5000, wire="fp32")
    offer(*nodes)
    for _ in range(2):
        for node in nodes:
            node.engine.syncer._delegate.consider(node.fragment, 2, frozenset("abcdefghijklmnopqrstuvwx"), {}, waited_enough=True)
    before = {node.id: node.session.stats().usage.bytes_down for node in nodes}
    by = commit(world, nodes, 2).by
    (syncer,) = (node for node in nodes if node.id == by)
    fragments = (syncer.session.stats().usage.bytes_down - before[by]) / (4 * 5000)
    assert fragments < 4 + 2, "four groups, and its own adoption"


# --- who dies, sleeps, comes late -------------------------------------------------------------------------


def delegate_of(nodes: list[Any], members: list[str]) -> Any:
    """The one that sums its group in version 2."""
    uplinks = {node.id: node.engine.publisher.uplink for node in nodes if node.id in members}
    first = delegate_order(nodes[0].run.manifest.nonce, 0, 2, uplinks)[0]
    return next(node for node in nodes if node.id == first)


def of_partial(operation: str, key: str) -> bool:
    return operation == "put" and keys.is_partial(key)


CRASHES: dict[str, Callable[[Any], Any]] = {
    "before it reads": lambda box: CrashBefore(box, lambda operation, key: operation == "get" and key.startswith("partials/")),
    "before its data": lambda box: CrashBefore(box, of_partial),
    "after its data": lambda box: CrashAfter(box, of_partial),
    "after its record": lambda box: CrashAfter(box, lambda operation, key: operation == "put_if_absent" and key.startswith("partials/")),
}


@pytest.mark.parametrize("when", CRASHES)
def test_a_delegate_that_dies_costs_no_contribution(world: Any, when: str) -> None:
    nodes = crowd(world)
    offer(*nodes)
    victim = delegate_of(nodes, max(groups(world, nodes).values(), key=len))
    victim.run.mailbox = CRASHES[when](victim.run.mailbox)
    with pytest.raises(Crash):
        victim.tick("syncer")
    made = commit(world, nodes, 2, but=victim)
    assert Counter(merged.learner_id for merged in made.merged) == Counter(NAMES)
    summed = {merged.learner_id for begin, end in slices(made) for merged in made.merged[begin:end]}
    assert (victim.id in summed) == (when == "after its record")
    (found,) = verify(world.mailbox, (world.commit(1), made))
    assert not found.problem


def test_who_comes_after_its_group_was_summed_is_counted_once_by_itself(world: Any) -> None:
    nodes = crowd(world)
    members = max(groups(world, nodes).values(), key=len)
    late = next(node for node in nodes if node.id == members[-1])
    offer(*(node for node in nodes if node is not late))
    delegate = delegate_of(nodes, members[:-1])
    delegate.engine.syncer._delegate.consider(delegate.fragment, 2, frozenset(NAMES) - {late.id}, {}, waited_enough=True)
    assert partials(world)
    offer(late)
    made = commit(world, nodes, 2)
    assert late.id in {merged.learner_id for merged in made.merged[slices(made)[-1][1] :]}
    check(world, nodes, made)


def test_a_group_waits_half_of_the_grace_for_its_members(world: Any) -> None:
    nodes = crowd(world, grace=20.0)
    members = max(groups(world, nodes).values(), key=len)
    offer(*(node for node in nodes if node.id != members[-1]))
    for _ in range(9):
        for node in nodes:
            node.tick("syncer")
            node.clock.advance(1.0)
    assert not [key for key in world.keys("partials/") if int(keys.last_segment(key)) == group_of_member(nodes, members[0])]
    for _ in range(3):
        for node in nodes:
            node.tick("syncer")
            node.clock.advance(1.0)
    assert [key for key in world.keys("partials/") if int(keys.last_segment(key)) == group_of_member(nodes, members[0])]
    assert world.commit(2) is None, "the round still waits"


def test_below_the_quorum_a_group_waits_for_all_its_members(world: Any) -> None:
    """A synchronous round has no grace, and closes when all are there."""
    nodes = crowd(world, quorum_size=len(NAMES))
    members = max(groups(world, nodes).values(), key=len)
    offer(*(node for node in nodes if node.id != members[-1]))
    for node in nodes:
        node.tick("syncer")
        node.clock.advance(60.0)
        node.tick("syncer")
    assert {int(keys.last_segment(key)) for key in world.keys("partials/")} == groups(world, nodes).keys() - {
        group_of_member(nodes, members[0])
    }


def group_of_member(nodes: list[Any], learner_id: str) -> int:
    return group_of(nodes[0].run.manifest.nonce, learner_id, groups_ahead(len(nodes), 3))


def test_of_two_delegates_the_second_deletes_its_sums(world: Any) -> None:
    nodes = crowd(world)
    offer(*nodes)
    group, members = max(groups(world, nodes).items(), key=lambda item: len(item[1]))
    one, other = (node for node in nodes if node.id in members[:2])

    def first(operation: str, key: str) -> bool:
        if operation == "put_if_absent" and key.startswith("partials/") and world.mailbox.get(key) is None:
            sum_up(one, group, members)
        return False

    other.run.mailbox = CrashBefore(other.run.mailbox, first)
    sum_up(other, group, members)
    assert len(partials(world)) == 2, "a record and its data"
    assert read(world.mailbox, Partial, keys.partial(0, 2, group)).by == one.id
    check(world, nodes, commit(world, nodes, 2))


def sum_up(node: Any, group: int, members: list[str]) -> None:
    node.engine.syncer._delegate._sum_up(node.fragment, 2, group, members, node.session.algorithm.merge_method(8))


def test_a_delegate_that_wakes_after_the_commit_changes_nothing_and_what_it_leaves_is_swept(world: Any) -> None:
    nodes = crowd(world, keep=1)
    offer(*nodes)
    group, members = max(groups(world, nodes).items(), key=lambda item: len(item[1]))
    zombie = next(node for node in nodes if node.id == members[0])
    woken = False

    def sleep(operation: str, key: str) -> bool:
        nonlocal woken
        if operation == "put" and keys.is_partial(key) and not woken:
            woken = True
            commit(world, nodes, 2, but=zombie)
        return False

    zombie.run.mailbox = CrashBefore(zombie.run.mailbox, sleep)
    sum_up(zombie, group, members)
    assert woken
    assert partials(world)
    before = nodes[0].run.values(world.commit(2))
    nodes = [node for node in nodes if node is not zombie]
    for version in (3, 4, 5):
        offer(*nodes)
        commit(world, nodes, version)
    assert not [key for key in partials(world) if keys.parse_round(key).version == 2]
    assert before is not None


def test_a_delegate_whose_mailbox_was_away_sums_up_when_it_is_back(world: Any) -> None:
    nodes = crowd(world)
    offer(*nodes)
    members = max(groups(world, nodes).values(), key=len)
    delegate = delegate_of(nodes, members)
    box = delegate.run.mailbox
    delegate.run.mailbox = Away(box)
    with pytest.raises(MailboxUnavailable):
        delegate.tick("syncer")
    delegate.run.mailbox = box
    began = delegate.clock.monotonic()
    made = commit(world, nodes, 2)
    assert tuple(members) in {tuple(sorted(m.learner_id for m in made.merged[a:b])) for a, b in slices(made)}
    assert delegate.clock.monotonic() - began < delegate.engine.syncer._settings.merge_timeout / 2, "nobody has waited in vain"
    check(world, nodes, made)


class Away(Interposed):
    """A mailbox that takes no sums."""

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], Any]) -> Any:
        if of_partial(operation, key):
            raise MailboxUnavailable("away")
        return carry_out()


def test_a_group_of_which_one_alone_is_sound_keeps_nobody_waiting(world: Any) -> None:
    nodes = crowd(world)
    offer(*nodes)
    members = max(groups(world, nodes).values(), key=len)
    delegate = delegate_of(nodes, members)
    lost = {*members} - {delegate.id}
    for key in world.keys("data/"):
        if keys.is_delta(key) and keys.parse_round(key).version == 2 and keys.data_owner(key) in lost:
            world.mailbox.delete(key)
    began = delegate.clock.monotonic()
    made = commit(world, nodes, 2)
    assert delegate.clock.monotonic() - began < delegate.engine.syncer._settings.merge_timeout / 2
    lost -= {made.by}  # who merges has its own at hand
    assert {merged.learner_id for merged in made.merged} == {*NAMES} - lost
    assert {left_out.learner_id for left_out in made.left_out} == lost
    assert not verify(world.mailbox, (world.commit(1), made))[0].problem


def test_sums_go_with_their_commit(world: Any) -> None:
    nodes = crowd(world, keep=4)
    offer(*nodes)
    assert commit(world, nodes, 2).ahead
    assert not partials(world)


def test_a_syncer_waits_for_sums_only_so_long(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = crowd(world)
    for node in nodes:
        monkeypatch.setattr(node.engine.syncer._delegate, "consider", lambda *_, **__: False)
    offer(*nodes)
    claimed = world.keys("claims/")
    for _ in range(3):
        for node in nodes:
            node.tick("syncer")
    assert world.keys("claims/") > claimed
    assert world.commit(2) is None
    made = commit(world, nodes, 2)
    assert made.ahead == ()
    check(world, nodes, made)


# --- who lies ----------------------------------------------------------------------------------------------


def with_data(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Run, Partial], Partial]:
    """Other sums, soundly named."""

    def lie(world: Any, run: Run, partial: Partial) -> Partial:
        (tensor,) = run.tensors(partial.data, run.layout[0])
        data = wire.encode([change(tensor)], run.layout[0], "fp32")
        world.mailbox.put(partial.data.key, data)
        return msgspec.structs.replace(partial, data=reference(partial.data.key, data, wire="fp32"))

    return lie


def record(**changes: Callable[[Partial], Any]) -> Callable[[Any, Run, Partial], Partial]:
    return lambda world, run, partial: msgspec.structs.replace(partial, **{name: change(partial) for name, change in changes.items()})


def first_as(**changes: Any) -> Callable[[Partial], Any]:
    return lambda partial: (msgspec.structs.replace(partial.merged[0], **changes), *partial.merged[1:])


LIES: dict[str, Callable[[Any, Run, Partial], Partial]] = {
    "not finite": with_data(lambda tensor: tensor * float("nan")),
    "out of proportion": with_data(lambda tensor: tensor * 1e12),
    "another version": record(version=lambda partial: partial.version + 1),
    "another group": record(group=lambda partial: partial.group + 1),
    "another method": record(method=lambda partial: "mean" if partial.method == "rda" else "rda"),
    "no radii": record(radii=lambda partial: ()),
    "a huge radius": record(radii=lambda partial: (1e29,)),
    "a contribution twice": record(merged=lambda partial: (partial.merged[0], *partial.merged)),
    "out of order": record(merged=lambda partial: partial.merged[::-1]),
    "more weight": record(merged=first_as(weight=1e6)),
    "no steps": record(merged=first_as(steps=0)),
    "more steps than there can be": record(merged=first_as(steps=2**53, samples=1, weight=2.0**-53)),
    "more samples than there can be": record(merged=first_as(steps=1, samples=10**15, weight=1e30)),
    "a tensor that is not there shortened": record(merged=first_as(clips={77: 0.5})),
    "a stranger": record(merged=first_as(learner_id="nobody")),
    "data elsewhere": record(data=lambda partial: msgspec.structs.replace(partial.data, key="run.json")),
    "another digest": record(data=lambda partial: msgspec.structs.replace(partial.data, sha256="0" * 64)),
    "too large": record(data=lambda partial: msgspec.structs.replace(partial.data, size=2**50)),
}


@pytest.mark.parametrize("lie", LIES)
def test_sums_that_cannot_be_right_are_passed_over_and_their_contributions_read(
    world: Any, caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    nodes = crowd(world, merge="rda")
    offer(*nodes)
    members = max(groups(world, nodes).values(), key=len)
    for node in nodes:
        node.engine.syncer._delegate.consider(node.fragment, 2, frozenset(NAMES), {}, waited_enough=True)
    group = group_of(nodes[0].run.manifest.nonce, members[0], 3)
    key = keys.partial(0, 2, group)
    partial = read(world.mailbox, Partial, key)
    assert partial is not None
    world.mailbox.put(key, encode(LIES[lie](world, nodes[0].run, partial)))
    with caplog.at_level(logging.WARNING):
        made = commit(world, nodes, 2)
    assert "passed over" in caplog.text
    assert not {merged.learner_id for begin, end in slices(made) for merged in made.merged[begin:end]} & {*members}
    check(world, nodes, made)


def test_a_replay_names_who_was_given_another_weight_than_it_has_offered(world: Any) -> None:
    """Sums that are made with it are in themselves sound."""
    nodes = crowd(world)
    offer(*nodes)
    made = commit(world, nodes, 2)
    first, *others = made.merged
    lie = msgspec.structs.replace(first, samples=9, steps=1, weight=81.0)
    (found,) = verify(world.mailbox, (world.commit(1), msgspec.structs.replace(made, merged=(lie, *others))))
    assert f"names other work or data of {first.learner_id} than it has offered" in found.problem


@pytest.mark.parametrize("name", ["abc", "-1", "0.5"])
def test_sums_that_shorten_what_has_no_place_are_no_record(world: Any, name: str) -> None:
    nodes = crowd(world)
    offer(*nodes)
    for node in nodes:
        node.engine.syncer._delegate.consider(node.fragment, 2, frozenset(NAMES), {}, waited_enough=True)
    for key in world.keys("partials/"):
        world.mailbox.put(key, world.mailbox.get(key).replace(b'"clips":{}', b'"clips":{"%s":0.5}' % name.encode(), 1))
    made = commit(world, nodes, 2)
    assert made.ahead == ()
    check(world, nodes, made)


@pytest.mark.parametrize("junk", [b"", b"{}", b"null", b"\xff\x00", b"[" * 10_000])
def test_junk_in_place_of_sums_is_passed_over(world: Any, junk: bytes) -> None:
    nodes = crowd(world)
    offer(*nodes)
    for group in range(3):
        world.mailbox.put(keys.partial(0, 2, group), junk)
    made = commit(world, nodes, 2)
    assert made.ahead == ()
    check(world, nodes, made)
