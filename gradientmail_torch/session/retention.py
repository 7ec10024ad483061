"""Removes what a run no longer needs. Commit records stay: they are small, and they are the fence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import takewhile

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

    def __init__(
        self,
        run: Run,
        *,
        keep: int | None,
        keep_seconds: float,
        last_whole: Callable[[int], int],
        live: Callable[[], Collection[str]],
        large: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """``last_whole`` gives the newest version up to a given one whose commit holds the whole fragment.

        ``live`` gives the learners that may be about to record what they have uploaded. ``large`` tells whether the run
        has so many that each removes its own record, all at the same time: one after the other would take its syncer long.
        """
        self._run = run
        self._live = live
        self._large = large
        self._last_whole = last_whole
        self._keep = keep
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._seen: dict[int, list[tuple[int, float]]] = {}

    def note(self, fragment: int, version: int) -> None:
        """``version`` of ``fragment`` has been seen committed."""
        if self._keep is None:
            return
        seen, now = self._seen.setdefault(fragment, []), self._clock.monotonic()
        if not seen or seen[-1][0] < version:
            seen.append((version, now))
        while len(seen) > self._keep + 1 and now - seen[1][1] >= self._keep_seconds:
            seen.pop(0)  # the next one is old enough as well

    def after_commit(self, fragment: int, version: int, records: Iterable[str]) -> None:
        """Called by the syncer of ``version``: what the commit says of ``records``, and of sums, has taken their place.

        Deleting them at once keeps the listing of open rounds, which everyone reads, as short as it can be.
        """
        self.note(fragment, version)
        if self._keep is None:
            return
        their_own = self._live() if self._large() else ()
        for key in records:
            if not (key.startswith(keys.ROUNDS) and keys.last_segment(key) in their_own):
                self._run.mailbox.delete(key)
        if version % self._keep == 0:
            self.sweep(fragment, version)

    def settled(self, record: str) -> None:
        """A commit has said what becomes of the contribution of this learner with that record."""
        if self._keep is not None and self._large():
            self._run.mailbox.delete(record)

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
        prefixes = (keys.round_prefix(fragment), keys.claim_prefix(fragment), keys.partial_prefix(fragment))
        records = [key for prefix in prefixes for key in self._until(prefix, bound)]
        data = self._old_data(fragment, bound, data_bound)
        # Last, so that a record which is made meanwhile is still seen.
        open_records = list(mailbox.list(keys.round_prefix(fragment), after=keys.round_prefix(fragment, bound + 1)))
        needed = self._needed(data, open_records)
        doomed = [*records, *(key for key in data if key not in needed)]
        for key in doomed:
            mailbox.delete(key)
        log.debug("fragment %d: swept %d objects up to version %d", fragment, len(doomed), bound)
        return len(doomed)

    def _until(self, prefix: str, bound: int) -> list[str]:
        return [key for key, _ in takewhile(lambda found: found[1] <= bound, self._versions(prefix))]

    def _old_data(self, fragment: int, bound: int, data_bound: int) -> list[str]:
        """Data of versions up to ``data_bound``, without the newest contribution of each live learner.

        Its upload may have taken many rounds, so that its record is still to be made. Whole values that were written
        after their commit, and sums for a round, go up to ``bound``: nothing is built on them.
        """
        live = self._live()
        found = list(self._versions(keys.data_prefix(fragment)))
        newest = {keys.data_owner(key): version for key, version in found if keys.is_delta(key)}

        def is_under_way(key: str, version: int) -> bool:
            owner = keys.data_owner(key)
            return keys.is_delta(key) and owner in live and newest[owner] == version

        def is_old(key: str, version: int) -> bool:
            needless = keys.is_partial(key) or (keys.is_whole(key) and self._last_whole(version) != version)
            return version <= (bound if needless else data_bound)

        return [key for key, version in found if is_old(key, version) and not is_under_way(key, version)]

    def _versions(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key in self._run.mailbox.list(prefix):
            with suppress(InvalidName):  # not ours
                yield key, keys.parse_round(key).version

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
