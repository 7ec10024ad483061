"""The objects of one workflow, or of one node that stands alone: its manifest, its markers, its tombstone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from gradientmail_torch import messages
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, RunMismatch, SynchronizationExpired
from gradientmail_torch.keys import ReachedKey, SyncKeys, decode_name, last_segment, parse_reached
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Nonce, Record
from gradientmail_torch.patterns.synchronization.dag import Dag, Reached, Trigger
from gradientmail_torch.patterns.synchronization.payload import PayloadRef, store


class Manifest(Record, frozen=True):
    """What all parties must agree on. Created once."""

    nonce: Nonce
    predecessors: dict[str, tuple[str, ...]]
    triggers: dict[str, Trigger]


class Marker(Record, frozen=True):
    """How a predecessor reached a node. The first one stands, so that a retry changes nothing."""

    nonce: Nonce
    reached: Reached
    payload: PayloadRef | None = None
    """What it called with."""
    error: str = ""
    """Why it failed."""
    owner: str = ""
    at: float = 0.0
    """Seconds since 1970 by the clock of the party that wrote it; for people."""


class Call(NamedTuple):
    """What became of a call or a skip."""

    accepted: bool
    """This is what the node will see. False when the predecessor had reached it before: nothing has changed."""
    complete: bool
    """Every predecessor has now reached the node."""


class Ledger:
    """Reads and writes the objects below ``keys.root``. Holds no state of its own, so that any party may die."""

    def __init__(self, mailbox: Mailbox, keys: SyncKeys, dag: Dag, *, owner: str, clock: Clock, rng: random.Random) -> None:
        self.mailbox = mailbox
        self.keys = keys
        self.dag = dag
        self.owner = owner
        self._clock = clock
        self._rng = rng

    def found(self) -> None:
        """Create the manifest, or see that it says the same. Raises :class:`RunMismatch`."""
        mine = Manifest(nonce=self.nonce(), predecessors=self.dag.predecessors, triggers=self.dag.triggers)
        found = messages.read(self.mailbox, Manifest, self.keys.manifest())
        if found is None:
            self.check_expired()
            if self.mailbox.put_if_absent(self.keys.manifest(), messages.encode(mine)):
                return
            found = messages.read(self.mailbox, Manifest, self.keys.manifest())
        if found is None:
            self.check_expired()
            raise CorruptObject(f"{self.keys.manifest()!r} in {self.mailbox!r} comes and goes")
        if difference := _difference(mine, found):
            raise RunMismatch(
                f"{self.keys.root!r} in {self.mailbox!r} was begun with other nodes: {difference}. "
                "Use another run_id, or the same nodes, predecessors (in the same order) and triggers everywhere"
            )

    def check_expired(self) -> None:
        """Raises :class:`SynchronizationExpired` when this has been swept away."""
        if self.mailbox.get(self.keys.expired(), length=1) is not None:
            raise SynchronizationExpired(f"{self.keys.root!r} in {self.mailbox!r} has been swept away: use a new run_id")

    def call(self, node: str, by: str, payload: object) -> bool:
        """Payload first, marker second. True when this call is the one that stands."""
        if self.has_reached(node, by):  # spares an upload that would be refused
            self.check_expired()
            return False
        nonce = self.nonce()
        key = self.keys.data(node, by, nonce)
        ref = store(self.mailbox, payload, lambda: key, what=f"the payload of {by!r} for {node!r}")
        accepted = self.mark(node, by, Marker(nonce=nonce, reached="called", payload=ref, owner=self.owner, at=self._clock.wall()))
        if not accepted and ref.data is not None:
            self.mailbox.delete(key)
        return accepted

    def skip(self, node: str, by: str) -> bool:
        return self.mark(node, by, Marker(nonce=self.nonce(), reached="skipped", owner=self.owner, at=self._clock.wall()))

    def mark(self, node: str, by: str, marker: Marker) -> bool:
        """Create ``by``'s marker at ``node``. True when it is this one that stands."""
        accepted = self.mailbox.put_if_absent(self.keys.reached(node, by), messages.encode(marker))
        # A sweeper sets its tombstone before it lists what it deletes: whoever sees none now has been listed.
        self.check_expired()
        if accepted:
            return True
        found = messages.read(self.mailbox, Marker, self.keys.reached(node, by))
        return found is not None and found.nonce == marker.nonce

    def has_reached(self, node: str, by: str) -> bool:
        return self.mailbox.get(self.keys.reached(node, by), length=1) is not None

    def missing(self, node: str) -> list[str]:
        """The predecessors that have not reached ``node``, by name: one request per 1,000 that have."""
        reached = {decode_name(last_segment(key)) for key in self.mailbox.list(self.keys.reached(node))}
        return [name for name in self.dag.predecessors[node] if name not in reached]

    def all_reached(self) -> set[ReachedKey]:
        """Every node and predecessor with a marker: one request per 1,000."""
        return {parse_reached(key) for key in self.mailbox.list(self.keys.reached())}

    def all_ended(self) -> set[str]:
        """The nodes with an outcome."""
        return {decode_name(last_segment(key)) for key in self.mailbox.list(self.keys.outcomes())}

    def markers(self, node: str) -> dict[str, Marker]:
        """The markers of a complete node, in declared order of its predecessors: one request each."""
        return dict(self._marker(node, name) for name in self.dag.predecessors[node])

    def nonce(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _marker(self, node: str, by: str) -> tuple[str, Marker]:
        key = self.keys.reached(node, by)
        found = messages.read(self.mailbox, Marker, key)
        if found is None:
            self.check_expired()
            raise CorruptObject(f"the marker {key!r} in {self.mailbox!r} was there and is gone")
        return by, found


def _difference(mine: Manifest, found: Manifest) -> str:
    for node in [*mine.predecessors, *found.predecessors]:
        here, there = mine.predecessors.get(node), found.predecessors.get(node)
        if here != there:
            return f"node {node!r} has {_names(here)} here and {_names(there)} there"
        if mine.triggers.get(node) != found.triggers.get(node):
            return f"node {node!r} has trigger {mine.triggers.get(node)!r} here and {found.triggers.get(node)!r} there"
    return ""


def _names(predecessors: Iterable[str] | None) -> str:
    if predecessors is None:
        return "no place"
    names = list(predecessors)
    return f"predecessors {', '.join(names[:10])}" + (f" and {len(names) - 10} more" if len(names) > 10 else "")
