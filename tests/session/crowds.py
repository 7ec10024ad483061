"""Learners who are so many that groups of their contributions are summed ahead."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.algorithms.merge import Weighted, merge
from gradientmail_torch.algorithms.quorum import group_of, groups_ahead
from gradientmail_torch.cli.verify import verify
from gradientmail_torch.messages import Commit

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


def slices(made: Commit) -> list[tuple[int, int]]:
    begin, found = 0, []
    for ahead in made.ahead:
        found.append((begin, begin + ahead.contributions))
        begin += ahead.contributions
    return found
