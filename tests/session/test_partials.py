"""Sums that somebody else has made: passed over where they cannot be right."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from gradientmail_torch import keys
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.quorum import group_of
from gradientmail_torch.cli.verify import verify
from gradientmail_torch.messages import Partial, encode, read, reference
from gradientmail_torch.session.run import Run
from tests.session.crowds import NAMES, check, commit, crowd, groups, offer, slices


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
