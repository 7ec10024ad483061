"""Rounds of which groups are summed ahead: everyone counts once, whoever dies, sleeps, comes late or lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gradientmail_torch import keys
from gradientmail_torch.algorithms.quorum import delegate_order, group_of, groups_ahead
from gradientmail_torch.cli.verify import verify
from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.messages import Partial, read
from gradientmail_torch.session.observer import UNREAD, Peer
from gradientmail_torch.testing.faults import Crash, CrashAfter, CrashBefore, Interposed
from tests.session.crowds import NAMES, check, commit, crowd, groups, meet, offer, partials, slices, strangers

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
