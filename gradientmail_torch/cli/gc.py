"""``gradientmail gc``: what a run no longer needs. Commit records are never among it: they are the fence.

Syncers sweep as they go. What is left is the last versions of a run that has ended, and what died learners had
uploaded. While a learner is there, only what its own sweep would take is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from gradientmail_torch import keys
from gradientmail_torch.cli.gather import gather
from gradientmail_torch.cli.run_view import FragmentView, RunView
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, InvalidName
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Commit, Contribution, DataRef, read


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Keys that can be deleted, by what they are."""

    old_data: tuple[str, ...] = ()
    """Tensors of versions that nobody needs any more."""
    old_records: tuple[str, ...] = ()
    """Contributions' records and claims of rounds long committed."""
    lost_foundings: tuple[str, ...] = ()
    """Initial values of learners that were not the first to found the run."""
    probes: tuple[str, ...] = ()

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.old_data, *self.old_records, *self.lost_foundings, *self.probes)


def passing(mailbox: Mailbox, nonce: str) -> set[str]:
    """What may be in the middle of something: look twice, some seconds apart, and take what is in both."""
    foundings = {key for key in mailbox.list(keys.INITIAL) if keys.segment_below(keys.INITIAL, key) != nonce}
    return foundings | set(mailbox.list(keys.PROBES))


def find(mailbox: Mailbox, view: RunView, *, keep: int, alive: bool, seen_before: set[str]) -> Garbage:
    """The garbage of the run in ``mailbox``.

    Args:
        keep: newest versions of each fragment that stay, with all that was merged into them.
        alive: whether some learner may be at work.
        seen_before: what :func:`passing` has found some seconds ago.
    """
    if keep < 1:
        raise ConfigError(f"keep must be at least 1 version, not {keep}: the newest one is the model")
    data: list[str] = []
    records: list[str] = []
    for fragment in view.fragments:
        bound = fragment.version - keep
        needed, first = _needed(mailbox, fragment, bound)
        last = min(bound, first - 1) if alive else fragment.version
        data += [key for key in _until(mailbox, keys.data_prefix(fragment.index), last) if key not in needed]
        for prefix in (keys.round_prefix(fragment.index), keys.claim_prefix(fragment.index), keys.partial_prefix(fragment.index)):
            records += _until(mailbox, prefix, bound)
    left = passing(mailbox, view.manifest.nonce) & seen_before
    probes = {key for key in left if key.startswith(keys.PROBES)}
    return Garbage(
        old_data=tuple(data), old_records=tuple(records), lost_foundings=tuple(sorted(left - probes)), probes=tuple(sorted(probes))
    )


def delete(mailbox: Mailbox, garbage: Garbage, *, clock: Clock = SYSTEM_CLOCK) -> None:
    gather([partial(mailbox.delete, key) for key in garbage.keys], clock=clock)


def _needed(mailbox: Mailbox, fragment: FragmentView, bound: int) -> tuple[set[str], int]:
    """Data that the versions behind ``bound`` are made of, and the version from which on their values are built."""
    needed = {record.data.key for record in _records(mailbox, fragment.index, bound)}
    version = fragment.version
    while version > 0:
        commit = read(mailbox, Commit, keys.commit(fragment.index, version))
        if commit is None:
            raise CorruptObject(f"{keys.commit(fragment.index, version)!r} in {mailbox!r} is gone: commits must never be deleted")
        needed |= {ref.key for ref in _named(commit, kept=version > bound)}
        if version <= bound + 1 and commit.parameters is not None:
            break
        version -= 1
    return needed, version


def _named(commit: Commit, *, kept: bool) -> Iterator[DataRef]:
    """What a commit is made of, and where its version is kept for itself, what it was merged from and its whole value."""
    yield from (ref for ref in (commit.update, commit.parameters, commit.outer) if ref is not None)
    if kept:
        yield from (merged.data for merged in commit.merged)
        yield from [commit.whole] if commit.whole is not None else []


def _records(mailbox: Mailbox, fragment: int, bound: int) -> Iterator[Contribution]:
    after = keys.round_prefix(fragment, bound + 1) if bound >= 0 else ""
    for key in mailbox.list(keys.round_prefix(fragment), after=after):
        with contextlib.suppress(CorruptObject):  # the syncer leaves it out
            record = read(mailbox, Contribution, key)
            if record is not None:
                yield record


def _until(mailbox: Mailbox, prefix: str, bound: int) -> Iterable[str]:
    for key in mailbox.list(prefix):
        with contextlib.suppress(InvalidName):  # not ours
            if keys.parse_round(key).version > bound:
                break
            yield key
