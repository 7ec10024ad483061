"""Learners for unit tests: real sessions on a clock that runs no threads; the test says who ticks, and when."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo
from gradientmail_torch.clock import Task
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Commit, Contribution, Record, encode, read
from gradientmail_torch.session import Session
from gradientmail_torch.testing.clock import ManualClock

WORKERS = ("heartbeat", "observer", "publisher", "aligner", "syncer", "whole-writer")


class _Ended:
    def join(self, timeout: float | None = None) -> bool:
        return True


class StillClock(ManualClock):
    """Starts no threads; while its owner waits, ``meanwhile`` happens."""

    def __init__(self, **start: float) -> None:
        super().__init__(**start)
        self.meanwhile: Callable[[], object] = lambda: None

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        if "goodbye" in name:  # all others would run for ever
            target()
        return _Ended()

    def wait(self, event: Any, timeout: float | None = None) -> bool:
        self.meanwhile()
        return event.is_set() or super().wait(event, timeout)

    def sleep(self, seconds: float) -> None:
        self.meanwhile()
        super().sleep(seconds)


class Node:
    """One learner. ``model.w`` is a vector, so that every number can be followed."""

    def __init__(
        self, mailbox: Mailbox, learner_id: str, clock: StillClock, algorithm: Algorithm, model: nn.Module, **settings: Any
    ) -> None:
        self.model, self.clock, self.id = model, clock, learner_id
        self.session = Session(model, mailbox=mailbox, learner_id=learner_id, algorithm=algorithm, clock=clock, **settings)
        self.engine = self.session._engine
        self.replica = self.session._replica
        assert self.replica is not None
        self.run = self.session.run
        self.fragment = self.replica.fragments[0]
        self.session.__enter__()

    @property
    def w(self) -> list[float]:
        return self.model.w.tolist()

    def tick(self, *workers: str) -> None:
        """One tick of each worker named, or of all."""
        for name in workers or WORKERS:
            self.engine._workers[name].tick()

    def until(self, condition: Callable[[], object], *workers: str) -> None:
        """Tick until ``condition`` holds, a second after the other; fails where it never does."""
        for _ in range(100):
            if condition():
                return
            self.tick(*workers)
            self.clock.advance(1.0)
        raise AssertionError("it never came")

    def merge(self, version: int, fragment: int = 0) -> Commit:
        """Let this node alone see to the round that leads to ``version``, whatever its place in the order."""
        self.until(lambda: self.run.commit(fragment, version), "syncer")
        commit = self.run.commit(fragment, version)
        assert commit is not None
        return commit

    def train(self, change: float = 1.0, *, steps: int = 1, samples: int = 1) -> None:
        """Optimizer steps that each add ``change`` to every trainable parameter."""
        for _ in range(steps):
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(change)
            self.session.step(samples=samples)

    def boundary(self) -> None:
        """What happens at a step boundary, without a step."""
        self.session._exchange(self.replica)

    def contribute(self) -> None:
        """Take what has been done as a contribution, due or not, where a call has not taken it already."""
        if self.fragment.pending is None:
            self.replica.contribute(self.fragment, f"{next(_NONCES):032x}")


_NONCES = itertools.count(1)


class Vector(nn.Module):
    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values or (0.0, 0.0)))


class World:
    """Nodes that share a mailbox and nothing else: each has its own clock."""

    def __init__(self, mailbox: MemoryMailbox) -> None:
        self.mailbox = mailbox
        self.nodes: dict[str, Node] = {}

    def node(
        self,
        learner_id: str = "a",
        algorithm: Algorithm | None = None,
        *,
        model: nn.Module | None = None,
        mailbox: Mailbox | None = None,
        **settings: Any,
    ) -> Node:
        clock = StillClock(monotonic=1000.0 * (len(self.nodes) + 1), wall=5e8 * (len(self.nodes) + 1))
        algorithm = algorithm or DecoupledDiLoCo(sync_every=1000, fragments=1, wire="fp32", commit_wire="fp32", grace=0.0)
        node = Node(mailbox or self.mailbox, learner_id, clock, algorithm, model or Vector(), **settings)
        clock.meanwhile = lambda: self.turn(but=node)
        self.nodes[learner_id] = node
        return node

    def turn(self, rounds: int = 1, *, but: Node | None = None, seconds: float = 1.0) -> None:
        """``rounds`` times: every worker of every node ticks, and time passes for all (for ``but`` it passes by itself)."""
        for _ in range(rounds):
            for node in self.nodes.values():
                if not node.session._closed:
                    node.tick()
                if node is not but:
                    node.clock.advance(seconds)

    def meet(self, *nodes: Node) -> None:
        """Let the nodes see each other's present state."""
        for worker in ("heartbeat", "observer"):
            for node in nodes or self.nodes.values():
                node.tick(worker)

    def commit(self, version: int, fragment: int = 0) -> Commit | None:
        return read(self.mailbox, Commit, keys.commit(fragment, version))

    def record(self, version: int, learner_id: str = "a", fragment: int = 0) -> Contribution | None:
        return read(self.mailbox, Contribution, keys.contribution(fragment, version, learner_id))

    def put(self, key: str, record: Record) -> None:
        self.mailbox.put(key, encode(record))

    def keys(self, prefix: str = "") -> list[str]:
        return list(self.mailbox.list(prefix))


@pytest.fixture
def world(mailbox: MemoryMailbox) -> Iterator[World]:
    world = World(mailbox)
    yield world
    for node in world.nodes.values():
        if not node.session._closed:
            node.engine.stop(1.0)
