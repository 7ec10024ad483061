"""The objects of a run: its manifest, learners, rounds, claims, commits and data."""

from __future__ import annotations

import re
from typing import NamedTuple

from gradientmail_torch.errors import InvalidName
from gradientmail_torch.keys.names import LEARNER_ID, check_learner_id, join, last_segment, number, parse_number

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
        return Life(check_learner_id(learner_id), parse_number(generation, 6))
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


def is_partial(key: str) -> bool:
    """Whether a ``data/`` object holds contributions that were summed ahead of the merge."""
    return key.endswith(".partial")


def is_whole(key: str) -> bool:
    """Whether a ``data/`` object holds a whole value of its fragment."""
    return key.endswith(".whole")


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


def partial(fragment: int, version: int, group: int) -> str:
    """The record of a group's contributions that were summed ahead of the merge."""
    return join("partials", number(fragment, 4), number(version), number(group, 6))


def partial_prefix(fragment: int, version: int | None = None) -> str:
    prefix = f"partials/{number(fragment, 4)}/"
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
        return RoundKey(parse_number(fragment, 4), parse_number(version, 10), "".join(last))
    except ValueError:
        raise InvalidName(f"{key!r} is not the key of a round") from None


def parse_contribution(key: str) -> RoundKey:
    """A ``rounds/`` key, whose last segment is a learner's ID; raises :class:`InvalidName`."""
    found = parse_round(key)
    if not key.startswith(ROUNDS) or not LEARNER_ID.fullmatch(found.last):
        raise InvalidName(f"{key!r} is not the key of a contribution")
    return found


def parse_commit(key: str) -> RoundKey:
    """A ``commits/`` key, with nothing behind its version; raises :class:`InvalidName`."""
    found = parse_round(key)
    if not key.startswith(COMMITS) or found.last:
        raise InvalidName(f"{key!r} is not the key of a commit")
    return found
