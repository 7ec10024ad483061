"""Removing the objects of workflows and nodes that nobody has touched for a long time."""

from __future__ import annotations

import hashlib
import logging
import os
import random
from collections import defaultdict
from collections.abc import Iterable

from gradientmail_torch import messages
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, InvalidName
from gradientmail_torch.keys import SyncKeys, check_learner_id
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.messages import Nonce, Record

log = logging.getLogger(__name__)


class _Idle(Record, frozen=True):
    """What one sweeper last saw of a run, and since when by its own clock."""

    fingerprint: str
    since: float
    """Seconds since 1970."""


class _Tombstone(Record, frozen=True):
    nonce: Nonce
    by: str
    at: float


def sweep(
    mailbox: Mailbox | str | os.PathLike[str],
    learner_id: str,
    *,
    ttl: float = 86400.0,
    lease: float = 60.0,
    clock: Clock = SYSTEM_CLOCK,
    rng: random.Random | None = None,
) -> list[str]:
    """Remove every workflow and lone node in which nothing has moved for ``ttl`` seconds. Returns their prefixes.

    Call it now and then, from a timer or at the start of a job, on a machine that stays: the first call that finds
    a run at rest notes it, and a later one, ``ttl`` seconds after, removes it if nothing has moved in between. So
    ages are counted between this machine's own calls, by its own clock, and no two machines' clocks are compared.

    A beating owner counts as movement, so a run with a live claim is never removed. A tombstone is set first and
    stays: who comes later gets :class:`SynchronizationExpired` instead of waiting for ever. Costs a request per
    1,000 objects, and two or three per run. ``ttl`` may not be shorter than the ``lease`` of the runs.
    """
    if not ttl >= lease or not lease > 0:
        raise ConfigError(f"ttl must be at least the lease of {lease} seconds (a day is usual), not {ttl!r}")
    check_learner_id(learner_id)
    mailbox = open_mailbox(mailbox, clock=clock)
    swept = []
    for root, found in _runs(mailbox).items():
        keys = SyncKeys(root)
        if keys.expired() in found:  # left by a sweeper that died, or written by a party that came late
            _delete(mailbox, keys, found)
        elif _at_rest(mailbox, keys, found, learner_id, ttl, clock):
            tombstone = _Tombstone(nonce=f"{(rng or random.Random()).getrandbits(64):016x}", by=learner_id, at=clock.wall())
            mailbox.put_if_absent(keys.expired(), messages.encode(tombstone))
            # Listed again: whoever wrote before the tombstone is deleted, whoever writes after it is told.
            _delete(mailbox, keys, list(mailbox.list(root)))
            log.info("%s in %r was swept away after %.0f s at rest", root, mailbox, ttl)
            swept.append(root)
    return swept


def _runs(mailbox: Mailbox) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for key in mailbox.list(SyncKeys.all()):
        try:
            found[SyncKeys.containing(key).root].append(key)
        except InvalidName:  # not ours
            continue
    return found


def _at_rest(mailbox: Mailbox, keys: SyncKeys, found: list[str], learner_id: str, ttl: float, clock: Clock) -> bool:
    now = clock.wall()
    fingerprint = _fingerprint(mailbox, keys, found)
    try:
        before = messages.read(mailbox, _Idle, keys.idle(learner_id))
    except CorruptObject:
        before = None
    if before is not None and before.fingerprint == fingerprint and before.since <= now:
        return now - before.since >= ttl
    mailbox.put(keys.idle(learner_id), messages.encode(_Idle(fingerprint=fingerprint, since=now)))
    return False


def _fingerprint(mailbox: Mailbox, keys: SyncKeys, found: list[str]) -> str:
    """Changes with every object that comes or goes, and with every beat."""
    digest = hashlib.sha256()
    for key in found:
        if not key.startswith(keys.idles()):
            digest.update(key.encode() + b"\n")
        if key.startswith(keys.beats()):
            digest.update(mailbox.get(key, length=messages.MAX_RECORD_BYTES) or b"")
    return digest.hexdigest()


def _delete(mailbox: Mailbox, keys: SyncKeys, found: Iterable[str]) -> None:
    for key in found:
        if key != keys.expired():
            mailbox.delete(key)
