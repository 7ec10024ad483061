"""Very many rounds in little time: sessions on clocks that run no threads. ``python -m tests.session.long_life``."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradientmail_torch.algorithms import DecoupledDiLoCo, OuterSGD
from gradientmail_torch.mailbox.memory import MemoryMailbox
from tests.session.conftest import Node, World

ALGORITHM = DecoupledDiLoCo(sync_every=2, fragments=2, grace=0.0, outer=OuterSGD(lr=0.9, momentum=0.5))
SETTINGS: dict[str, Any] = {"lease": 30.0, "poll_interval": 1.0, "keep": 4, "keep_seconds": 10.0}
MOST_OF = {"commits", "learners"}
"""What grows by design: a small record for each commit, and one for each life."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What there is after so many rounds."""

    rounds: int
    lives: int
    objects: dict[str, int]
    """By the first segment of their keys."""
    bytes: dict[str, int]
    held: dict[str, int]
    """Entries that the sessions keep in memory, by where."""
    resident_bytes: int

    @property
    def bounded_objects(self) -> int:
        return sum(count for kind, count in self.objects.items() if kind not in MOST_OF)

    @property
    def bounded_bytes(self) -> int:
        return sum(count for kind, count in self.bytes.items() if kind not in MOST_OF)

    def text(self) -> str:
        objects = " ".join(f"{kind} {count}/{self.bytes[kind]:,} B" for kind, count in sorted(self.objects.items()))
        held = " ".join(f"{name} {count}" for name, count in sorted(self.held.items()))
        return f"{self.rounds:7} rounds {self.lives:5} lives  {objects}\n{'':14} held: {held}; resident {self.resident_bytes >> 20} MiB"


@dataclass
class Life:
    """A run in which one node stays and others come, die and come back, some under new names."""

    life_rounds: int = 400
    """Rounds after which the second node is replaced."""
    store: MemoryMailbox = field(default_factory=MemoryMailbox)

    def __post_init__(self) -> None:
        self.world = World(self.store)
        self.stays = self._start("stays")
        self.comes: Node | None = self._start("comes-0")
        self.lives = 2
        self._turns = self._replaced_at = 0

    def _start(self, name: str) -> Node:
        return self.world.node(name, ALGORITHM, model=Net(), **SETTINGS)

    @property
    def rounds(self) -> int:
        return sum(fragment.known for fragment in self.stays.replica.fragments)

    def live(self, rounds: int) -> None:
        """Until there are ``rounds`` rounds."""
        while self.rounds < rounds:
            for node in list(self.world.nodes.values()):
                node.train(0.01)
                node.tick("publisher", "aligner", "syncer", "aligner")
                if self._turns % 5 == 0:
                    node.tick("heartbeat", "observer")
                node.clock.advance(1.0)
            self._turns += 1
            if self.rounds - self._replaced_at >= self.life_rounds:
                self._replaced_at = self.rounds
                self._replace()

    def _replace(self) -> None:
        """The second node dies or leaves; another comes, under its name or a new one."""
        assert self.comes is not None
        if self.lives % 3 == 0:
            self.comes.session.leave(timeout=1.0)
        name = self.comes.id if self.lives % 2 else f"comes-{self.lives}"
        del self.world.nodes[self.comes.id]
        self.comes = self._start(name)
        self.lives += 1

    def figures(self) -> Figures:
        gc.collect()
        objects: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for key in self.store.list(""):
            kind = key.split("/", 1)[0]
            objects[kind] += 1
            sizes[kind] += len(self.store.get(key) or b"")
        return Figures(
            rounds=self.rounds,
            lives=self.lives,
            objects=dict(objects),
            bytes=dict(sizes),
            held=dict(self._held()),
            resident_bytes=resident(),
        )

    def _held(self) -> Iterator[tuple[str, int]]:
        """Sizes of every container in a part of the session that stays."""
        engine = self.stays.engine
        parts = {"syncer": engine.syncer, "publisher": engine.publisher, "aligner": engine.aligner, "retention": engine._retention,
                 "membership": engine._membership, "observer": engine._membership._observer, "replica": self.stays.replica}  # fmt: skip
        for name, part in parts.items():
            for attribute, value in vars(part).items():
                if isinstance(value, (dict, list, set, frozenset)):
                    yield f"{name}.{attribute.lstrip('_')}", sum(map(_size, value.values())) if isinstance(value, dict) else len(value)


def _size(value: object) -> int:
    return 1 + (len(value) if isinstance(value, (dict, list, set, frozenset)) else 0)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.session.long_life", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100_000)
    options = parser.parse_args()
    life = Life()
    began = time.monotonic()
    for part in range(1, 11):
        life.live(options.rounds * part // 10)
        print(f"{life.figures().text()}; {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
