"""What goes wrong, and when: a plan that a seed decides."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Store = Literal["s3", "directory"]
Kind = Literal["kill", "suspend", "usurp", "outage", "failing", "slow", "server restart", "full disk"]

NODE_KINDS: tuple[Kind, ...] = ("kill", "suspend", "usurp")
"""SIGKILL and a restart under the same name; SIGSTOP for longer than the lease; the same, and another takes the name over."""
STORE_KINDS: dict[Store, tuple[Kind, ...]] = {"s3": ("outage", "failing", "slow", "server restart"), "directory": ("full disk",)}
TAIL_S = 5.0
"""Quiet at the end of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    at_s: float
    """After all nodes have begun to train."""
    kind: Kind
    seconds: float
    """How long it lasts; for a kill, until the restart."""
    node: str = ""
    """For what befalls one node."""

    @property
    def until_s(self) -> float:
        return self.at_s + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int = 0
    seconds: float = 600.0
    store: Store = "s3"
    nodes: int = 4
    lease_s: float = 6.0
    longest_outage_s: float = 60.0

    @property
    def names(self) -> list[str]:
        return [f"node-{number}" for number in range(self.nodes)]

    def incidents(self) -> list[Incident]:
        """Every kind at least once if there is time for it, then at random; in the order of their begin.

        Of each kind that befalls the store one happens at a time, of each kind that befalls a node one on each node,
        and at least one node is always left alone.
        """
        rng = random.Random(f"chaos {self.seed} {self.store}")
        kinds = [*NODE_KINDS, *STORE_KINDS[self.store]]
        rng.shuffle(kinds)
        gap_s = max(2.0, min(12.0, (self.seconds - TAIL_S) / (len(kinds) + 1)))
        free_at = dict.fromkeys([*self.names, "store"], 0.0)
        found: list[Incident] = []
        at_s = rng.uniform(0.5, 1.0) * gap_s
        while at_s < self.seconds - TAIL_S:
            kind = kinds.pop() if kinds else rng.choice([*NODE_KINDS, *STORE_KINDS[self.store]])
            incident = self._incident(rng, kind, at_s, free_at)
            if incident is not None:
                free_at[incident.node or "store"] = incident.until_s + 2.0
                found.append(incident)
            at_s += rng.uniform(0.5, 1.5) * gap_s
        return found

    def _incident(self, rng: random.Random, kind: Kind, at_s: float, free_at: dict[str, float]) -> Incident | None:
        """None where it would come on top of another of its kind, or leave no node alone."""
        free = [name for name in self.names if free_at[name] <= at_s]
        left_s = self.seconds - TAIL_S - at_s
        shortest_s, longest_s = {
            "kill": (0.5, 15.0),
            "suspend": (1.3 * self.lease_s, 3 * self.lease_s),
            "usurp": (self.lease_s + 2, self.lease_s + 2),
            "outage": (2.0, self.longest_outage_s),
            "failing": (8.0, 40.0),
            "slow": (8.0, 40.0),
            "server restart": (0.5, 8.0),
            "full disk": (5.0, 30.0),
        }[kind]
        if left_s < shortest_s:
            return None
        seconds = rng.uniform(shortest_s, max(shortest_s, min(longest_s, left_s)))
        if kind not in NODE_KINDS:
            return Incident(at_s=at_s, kind=kind, seconds=seconds) if free_at["store"] <= at_s else None
        return Incident(at_s=at_s, kind=kind, seconds=seconds, node=rng.choice(free)) if len(free) > 1 else None
