"""Removes what a run no longer needs. Commit records stay: they are small, and they are the fence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gradientmail_torch import keys
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject, InvalidName
from gradientmail_torch.messages import Contribution, read
from gradientmail_torch.session.run import Run

log = logging.getLogger(__name__)


class Retention:
    """Deletes the data and records of versions that are both ``keep`` versions and ``keep_seconds`` old.

    Age is what this learner has observed by its own clock. A sweep takes everything older than the bound, not
    only its own round, so objects of learners that died or came late do not pile up.
    """

    def __init__(self, run: Run, *, keep: int | None, keep_seconds: float, last_whole: Callable[[int], int], clock: Clock) -> None:
        """``last_whole`` gives the newest version up to a given one whose commit holds the whole fragment."""
        self._run = run
        self._last_whole = last_whole
        self._keep = keep
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._seen: dict[int, list[tuple[int, float]]] = {}

    def note(self, fragment: int, version: int) -> None:
        """``version`` of ``fragment`` has been seen committed."""
        seen = self._seen.setdefault(fragment, [])
        if not seen or seen[-1][0] < version:
            seen.append((version, self._clock.monotonic()))

    def after_commit(self, fragment: int, version: int, records: Iterable[str]) -> None:
        """Called by the syncer of ``version``: what the commit says of ``records`` has taken their place.

        Deleting them at once keeps the listing of open rounds, which everyone reads, as short as it can be.
        """
        self.note(fragment, version)
        if self._keep is None:
            return
        for key in records:
            self._run.mailbox.delete(key)
        if version % self._keep == 0:
            self.sweep(fragment, version)

    def sweep(self, fragment: int, newest: int) -> int:
        """Delete what is older than the bound; returns the number of objects."""
        assert self._keep is not None
        now = self._clock.monotonic()
        aged = [
            version for version, at in self._seen.get(fragment, []) if version <= newest - self._keep and now - at >= self._keep_seconds
        ]
        if not aged:
            return 0
        bound = aged[-1]
        # What follows the last whole value is needed to make the versions after it.
        data_bound = min(bound, self._last_whole(newest - self._keep) - 1)
        self._seen[fragment] = [(version, at) for version, at in self._seen[fragment] if version >= bound]
        mailbox = self._run.mailbox
        records = [*self._until(keys.round_prefix(fragment), bound), *self._until(keys.claim_prefix(fragment), bound)]
        data = self._until(keys.data_prefix(fragment), data_bound)
        # Last, so that a record which is made meanwhile is still seen.
        open_records = list(mailbox.list(keys.round_prefix(fragment), after=keys.round_prefix(fragment, bound + 1)))
        doomed = [*records, *(set(data) - self._needed(data, open_records))]
        for key in doomed:
            mailbox.delete(key)
        log.debug("fragment %d: swept %d objects up to version %d", fragment, len(doomed), bound)
        return len(doomed)

    def _until(self, prefix: str, bound: int) -> list[str]:
        found = []
        for key in self._run.mailbox.list(prefix):
            try:
                if keys.parse_round(key).version > bound:
                    break
            except InvalidName:
                continue  # not ours
            found.append(key)
        return found

    def _needed(self, data: list[str], open_records: list[str]) -> set[str]:
        """Data that is old and yet named by a record in an open round: its upload took longer than a round."""
        owners = {keys.last_segment(key) for key in open_records}
        candidates = {key for key in data if keys.data_owner(key) in owners}
        if not candidates:
            return set()
        needed = set()
        for key in open_records:
            try:
                record = read(self._run.mailbox, Contribution, key)
            except CorruptObject:
                continue  # the syncer leaves it out
            if record is not None and record.data.key in candidates:
                needed.add(record.data.key)
        return needed
