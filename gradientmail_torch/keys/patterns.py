"""The objects of the coordination patterns: barriers, leased work, queues, synchronization nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradientmail_torch.errors import InvalidName
from gradientmail_torch.keys.names import LEARNER_ID, decode_name, encode_name, number, parse_number


def barrier_prefix(name: str) -> str:
    return f"barriers/{encode_name(name, what='barrier name')}/"


def barrier(name: str, learner_id: str) -> str:
    return barrier_prefix(name) + encode_name(learner_id, what="learner_id")


def parse_arrival(key: str) -> str | None:
    """The learner ID of a ``barriers/`` key; None where something else lies there, such as a file manager's file."""
    *_, learner_id = key.split("/", 2)
    return learner_id if LEARNER_ID.fullmatch(learner_id) else None


@dataclass(frozen=True, slots=True)
class WorkKeys:
    """The keys of leased work (:mod:`gradientmail_torch.patterns.leased_work`) below ``root``, which ends with ``/``."""

    root: str

    def claim(self, item: str, attempt: int) -> str:
        return self.claims(item) + number(attempt, 6)

    def claims(self, item: str | None = None) -> str:
        """Prefix of an item's claims, or of all."""
        return f"{self.root}claims/" if item is None else f"{self.root}claims/{encode_name(item, what='work item')}/"

    def beat(self, owner: str) -> str:
        return self.beats() + encode_name(owner, what="owner")

    def beats(self) -> str:
        return f"{self.root}beats/"

    def outcome(self, item: str) -> str:
        return self.outcomes() + encode_name(item, what="work item")

    def outcomes(self) -> str:
        return f"{self.root}outcomes/"


class ClaimKey(NamedTuple):
    item: str
    attempt: int


def parse_claim(key: str) -> ClaimKey:
    """The item and attempt of a key below ``claims/`` (or ``errors/``) of a :class:`WorkKeys`; raises :class:`InvalidName`."""
    try:
        _, item, attempt = key.rsplit("/", 2)
        return ClaimKey(decode_name(item), parse_number(attempt, 6))
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a claim") from None


@dataclass(frozen=True, slots=True)
class QueueKeys(WorkKeys):
    """The keys of a Shared Queue. An item is named by its place in the queue."""

    @staticmethod
    def of(name: str) -> QueueKeys:
        return QueueKeys(f"queues/{encode_name(name, what='queue name')}/")

    def manifest(self) -> str:
        return f"{self.root}manifest"

    def items(self, digest: str, block: int) -> str:
        return f"{self.root}items/{digest}/{number(block)}"

    def item(self, place: int) -> str:
        return number(place)

    def claims_from(self, place: int) -> str:
        """What sorts just before the claims of the item at ``place``."""
        return self.claims() + number(place)

    def error(self, item: str, attempt: int) -> str:
        """Why an attempt gave the item up."""
        return self.errors(item) + number(attempt, 6)

    def errors(self, item: str | None = None) -> str:
        return f"{self.root}errors/" if item is None else f"{self.root}errors/{encode_name(item)}/"


_SYNC = "sync/"


@dataclass(frozen=True, slots=True)
class SyncKeys(WorkKeys):
    """The keys of one workflow, or of one synchronization node that stands alone. A work item is a node."""

    @staticmethod
    def of_workflow(run_id: str) -> SyncKeys:
        return SyncKeys(f"{_SYNC}{encode_name(run_id, what='run_id')}/workflow/")

    @staticmethod
    def of_node(run_id: str, node: str) -> SyncKeys:
        return SyncKeys(f"{_SYNC}{encode_name(run_id, what='run_id')}/node/{encode_name(node, what='node name')}/")

    @staticmethod
    def all() -> str:
        """Prefix of everything that synchronization writes."""
        return _SYNC

    @staticmethod
    def containing(key: str) -> SyncKeys:
        """The workflow or node that ``key`` belongs to; raises :class:`InvalidName`."""
        parts = key.split("/")
        length = {"workflow": 3, "node": 4}.get(parts[2] if len(parts) > 3 else "", 0)
        if not length or len(parts) <= length:
            raise InvalidName(f"{key!r} is not a key of a synchronization")
        return SyncKeys("/".join(parts[:length]) + "/")

    @property
    def names(self) -> tuple[str, str]:
        """The run's ID, and the name of the node that stands alone; empty for a workflow."""
        _, run_id, _, *node = self.root.removesuffix("/").split("/")
        return decode_name(run_id), decode_name(node[0]) if node else ""

    def manifest(self) -> str:
        return f"{self.root}manifest"

    def expired(self) -> str:
        """The tombstone: what it marks has been swept away and must not be begun again."""
        return f"{self.root}expired"

    def idle(self, learner_id: str) -> str:
        """What a sweeper last saw."""
        return self.idles() + encode_name(learner_id)

    def idles(self) -> str:
        return f"{self.root}idle/"

    def data(self, node: str, by: str, nonce: str) -> str:
        """A payload, written by one party only."""
        return f"{self.root}data/{encode_name(node)}/{encode_name(by)}/{nonce}"

    def result(self, node: str, nonce: str) -> str:
        """What a node's function returned, written by one attempt only."""
        return f"{self.root}results/{encode_name(node)}/{nonce}"

    def reached(self, node: str | None = None, by: str | None = None) -> str:
        """The marker of a predecessor; or the prefix of a node's markers, or of all."""
        parts = [encode_name(name) for name in (node, by) if name is not None]
        return f"{self.root}reached/" + "/".join(parts) + ("/" if len(parts) == 1 else "")


class ReachedKey(NamedTuple):
    node: str
    by: str


def parse_reached(key: str) -> ReachedKey:
    """The node and the predecessor of a key below ``reached/`` of :class:`SyncKeys`; raises :class:`InvalidName`."""
    try:
        _, node, by = key.rsplit("/", 2)
        return ReachedKey(decode_name(node), decode_name(by))
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a marker") from None
