"""The names of a run's objects: the only module that puts ``/`` into a key.

Numbers are zero-padded so that listings sort. Names given by a caller are percent-encoded, so that any
text may be a barrier's or a learner's name and none can leave its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from gradientmail_torch.errors import ConfigError, InvalidName

MAX_NAME_BYTES = 200  # a file name holds 255; room for a nonce beside the name
MAX_SEGMENT_BYTES = 255
MAX_KEY_BYTES = 900  # S3 holds 1024; room for the run's prefix
_VALID_KEY = re.compile(r"(?!.*//)[A-Za-z0-9._~%-][A-Za-z0-9._~%/-]*(?<!/)")


def encode_name(name: str, *, what: str = "name") -> str:
    """``name`` as one segment of a key. Raises :class:`InvalidName` when empty or too long."""
    if not isinstance(name, str) or not name:
        raise InvalidName(f"{what} must be a non-empty string, not {name!r}")
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidName(f"{what} {name!r} holds half a surrogate pair, which no store can hold") from None
    if set(name) == {"."}:  # "." and ".." mean something to a directory
        encoded = encoded.replace(".", "%2E")
    if len(encoded) > MAX_NAME_BYTES:
        raise InvalidName(f"{what} {name[:40]!r}… takes {len(encoded)} bytes in a key, at most {MAX_NAME_BYTES} fit: shorten it")
    return encoded


def decode_name(segment: str) -> str:
    return unquote(segment)


_LEARNER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_learner_id(learner_id: str) -> str:
    """A learner ID that reads the same in a key, a file name and a table; raises :class:`ConfigError`."""
    if not isinstance(learner_id, str) or not _LEARNER_ID.fullmatch(learner_id):
        raise ConfigError(
            f"learner_id {learner_id!r} cannot be used: 1 to 100 letters, digits, '.', '_' and '-', "
            "the first a letter or digit (for example 'node-0')"
        )
    return learner_id


def check_key(key: str) -> str:
    """``key`` if every store can hold it, a directory included; raises :class:`InvalidName`."""
    if not _VALID_KEY.fullmatch(key) or any(set(part) == {"."} for part in key.split("/")):
        raise InvalidName(f"mailbox key {key[:MAX_KEY_BYTES]!r} is not a path of non-empty segments of letters, digits and . _ ~ % -")
    if len(key) > MAX_KEY_BYTES or max(map(len, key.split("/"))) > MAX_SEGMENT_BYTES:
        raise InvalidName(
            f"mailbox key {key[:MAX_NAME_BYTES]!r}… is too long: at most {MAX_KEY_BYTES} bytes, {MAX_SEGMENT_BYTES} in a segment"
        )
    return key


def join(*segments: str) -> str:
    return "/".join(segments)


def number(value: int, width: int = 10) -> str:
    return f"{value:0{width}d}"


def _parse_number(text: str, width: int) -> int:
    """What :func:`number` has written; ``int`` alone would take -5, 1_0 and 5 as well."""
    if not text.isdecimal() or number(int(text), width) != text:
        raise ValueError(text)
    return int(text)


def last_segment(key: str) -> str:
    return key.rsplit("/", 1)[-1]


# --- the run -----------------------------------------------------------------------------------------

RUN = "run.json"
BEATS = "beats/"
ROUNDS = "rounds/"
COMMITS = "commits/"


def initial(nonce: str, fragment: int) -> str:
    """A founder's initial value of ``fragment``."""
    return join("init", nonce, number(fragment, 4))


def learner(learner_id: str, generation: int) -> str:
    """Who this life of a learner ID is."""
    return join("learners", learner_id, number(generation, 6))


def learner_lives(learner_id: str) -> str:
    """Prefix of all lives of a learner ID."""
    return f"learners/{learner_id}/"


def beat(learner_id: str, generation: int) -> str:
    return join("beats", learner_id, number(generation, 6))


class Life(NamedTuple):
    learner_id: str
    generation: int


def parse_life(key: str) -> Life:
    """The learner ID and generation of a ``learners/`` or ``beats/`` key; raises :class:`InvalidName`."""
    try:
        _, learner_id, generation = key.split("/")
        return Life(check_learner_id(learner_id), _parse_number(generation, 6))
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a learner's life") from None


# --- fragments ---------------------------------------------------------------------------------------


def data(fragment: int, version: int, owner: str, nonce: str, part: str) -> str:
    """Tensors, written by one owner only. ``version`` is what retention goes by: the version they lead to."""
    return join("data", number(fragment, 4), number(version), f"{owner}-{nonce}.{part}")


def data_prefix(fragment: int) -> str:
    return f"data/{number(fragment, 4)}/"


def data_owner(key: str) -> str:
    """The learner that wrote a ``data/`` object."""
    return last_segment(key).rpartition("-")[0]


def is_delta(key: str) -> bool:
    """Whether a ``data/`` object holds a contribution."""
    return key.endswith(".delta")


def is_delta_of(key: str, fragment: int, learner_id: str, nonce: str) -> bool:
    """Whether ``key`` is where this learner keeps the data of this contribution to ``fragment``, of whatever version."""
    try:
        found = parse_round(key)
    except InvalidName:
        return False
    return key.startswith(data_prefix(fragment)) and found.last == f"{learner_id}-{nonce}.delta"


def contribution(fragment: int, version: int, learner_id: str) -> str:
    """The record of a learner's contribution to the round that leads to ``version``."""
    return join("rounds", number(fragment, 4), number(version), learner_id)


def round_prefix(fragment: int, version: int | None = None) -> str:
    prefix = f"rounds/{number(fragment, 4)}/"
    return prefix if version is None else f"{prefix}{number(version)}/"


def claim(fragment: int, version: int, attempt: int) -> str:
    return join("claims", number(fragment, 4), number(version), number(attempt, 6))


def claim_prefix(fragment: int, version: int | None = None) -> str:
    prefix = f"claims/{number(fragment, 4)}/"
    return prefix if version is None else f"{prefix}{number(version)}/"


def commit(fragment: int, version: int) -> str:
    return join("commits", number(fragment, 4), number(version))


def commit_prefix(fragment: int) -> str:
    return f"commits/{number(fragment, 4)}/"


_LAST_OF_ROUND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class RoundKey(NamedTuple):
    """A parsed key below ``rounds/``, ``claims/``, ``data/`` or ``commits/``."""

    fragment: int
    version: int
    last: str


def parse_round(key: str) -> RoundKey:
    """Raises :class:`InvalidName` for a key that is not of the grammar above."""
    try:
        _, fragment, version, *last = key.split("/")
        if len(last) > 1 or (last and not _LAST_OF_ROUND.fullmatch(last[0])):  # a folder's own object, a file manager's file
            raise ValueError(key)
        return RoundKey(_parse_number(fragment, 4), _parse_number(version, 10), "".join(last))
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a round") from None


def parse_contribution(key: str) -> RoundKey:
    """A ``rounds/`` key, whose last segment is a learner's ID; raises :class:`InvalidName`."""
    found = parse_round(key)
    if not key.startswith(ROUNDS) or not _LEARNER_ID.fullmatch(found.last):
        raise InvalidName(f"{key!r} is not the key of a contribution")
    return found


def parse_commit(key: str) -> RoundKey:
    """A ``commits/`` key, with nothing behind its version; raises :class:`InvalidName`."""
    found = parse_round(key)
    if not key.startswith(COMMITS) or found.last:
        raise InvalidName(f"{key!r} is not the key of a commit")
    return found


# --- patterns ----------------------------------------------------------------------------------------


def barrier_prefix(name: str) -> str:
    return f"barriers/{encode_name(name, what='barrier name')}/"


def barrier(name: str, learner_id: str) -> str:
    return barrier_prefix(name) + encode_name(learner_id, what="learner_id")


def parse_arrival(key: str) -> str | None:
    """The learner ID of a ``barriers/`` key; None where something else lies there, such as a file manager's file."""
    *_, learner_id = key.split("/", 2)
    return learner_id if _LEARNER_ID.fullmatch(learner_id) else None


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
        return ClaimKey(decode_name(item), _parse_number(attempt, 6))
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


_TASK_SEPARATOR = "."


@dataclass(frozen=True, slots=True)
class TaskKeys(WorkKeys):
    """The keys of a steering queue. A work item is a task: ``{created}-{task_id}.{topic}``, so that items sort by age."""

    @staticmethod
    def of(name: str) -> TaskKeys:
        return TaskKeys(f"steering/{encode_name(name, what='queue name')}/")

    def item(self, created_ms: int, task_id: str, topic: str) -> str:
        found = f"{number(created_ms, 15)}-{task_id}{_TASK_SEPARATOR}{topic}"
        encode_name(found, what="task ID and topic together")  # refused here, before anything is sent
        return found

    def request(self, method: str, item: str) -> str:
        return self.requests(method) + encode_name(item)

    def requests(self, method: str | None = None) -> str:
        return f"{self.root}requests/" if method is None else f"{self.root}requests/{encode_name(method, what='method')}/"

    def outcome(self, item: str) -> str:
        stem, topic = item.split(_TASK_SEPARATOR, 1)
        return self.results(topic) + encode_name(stem)

    def part(self, item: str, attempt: int, place: int) -> str:
        """An intermediate result, written by one attempt only; sorts behind the outcome."""
        return f"{self.outcome(item)}{_TASK_SEPARATOR}{number(attempt, 6)}{_TASK_SEPARATOR}{number(place, 6)}"

    def results(self, topic: str) -> str:
        return f"{self.root}results/{encode_name(topic, what='topic')}/"

    def results_from(self, item: str) -> str:
        """What sorts just before the results of ``item`` and of younger ones."""
        return self.outcome(item)[:-1]

    def data(self, item: str, nonce: str, place: int) -> str:
        """A large value, written by one party only."""
        return f"{self.data_of(item)}{nonce}-{place}"

    def data_of(self, item: str) -> str:
        return f"{self.all_data()}{encode_name(item)}/"

    def all_data(self) -> str:
        return f"{self.root}data/"

    def server(self, learner_id: str) -> str:
        return self.servers() + encode_name(learner_id, what="learner_id")

    def servers(self) -> str:
        return f"{self.root}servers/"

    def stop(self) -> str:
        return f"{self.root}stop"


class RequestKey(NamedTuple):
    method: str
    item: str
    task_id: str
    topic: str


def parse_request(key: str) -> RequestKey:
    """What a key below ``requests/`` of :class:`TaskKeys` is about; raises :class:`InvalidName`."""
    try:
        _, method, segment = key.rsplit("/", 2)
        item = decode_name(segment)
        stem, topic = item.split(_TASK_SEPARATOR, 1)
        created, task_id = stem.split("-", 1)
        _parse_number(created, 15)
        return RequestKey(decode_name(method), item, task_id, topic)
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a task") from None


class ResultKey(NamedTuple):
    item: str
    part: tuple[int, int] | None
    """Attempt and place of an intermediate result; None for the outcome."""


def parse_result(key: str) -> ResultKey:
    """What a key below ``results/`` of :class:`TaskKeys` is about; raises :class:`InvalidName`."""
    try:
        _, topic, segment = key.rsplit("/", 2)
        stem, *part = segment.split(_TASK_SEPARATOR)
        attempt, place = part or (None, None)
        return ResultKey(
            decode_name(stem) + _TASK_SEPARATOR + decode_name(topic),
            (_parse_number(attempt, 6), _parse_number(place, 6)) if attempt is not None and place is not None else None,
        )
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a result") from None


# --- looking at a mailbox from outside -----------------------------------------------------------------

LEARNERS = "learners/"
INITIAL = "init/"
BARRIERS = "barriers/"
QUEUES = "queues/"
PROBES = "probe/"


def segment_below(prefix: str, key: str) -> str:
    """The segment of ``key`` that follows ``prefix``, decoded."""
    return decode_name(key[len(prefix) :].split("/", 1)[0])


def behind_segment(prefix: str, name: str) -> str:
    """What sorts behind every key of the pattern ``name`` below ``prefix``."""
    return f"{prefix}{encode_name(name)}/~"


def doctor(nonce: str, name: str) -> str:
    """An object that an examination of the store writes and deletes."""
    return join("probe", f"doctor-{nonce}", name)


def doctor_prefix(nonce: str) -> str:
    return f"probe/doctor-{nonce}/"
