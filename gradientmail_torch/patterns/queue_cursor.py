"""Where a party looks for its next item, so that parties seldom meet and a claim costs no listing of all items."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import InvalidName
from gradientmail_torch.keys import QueueKeys, parse_claim
from gradientmail_torch.mailbox import Mailbox

T = TypeVar("T")

_LARGEST_RUN = 64
_RUNS = 16
"""A queue is cut in about so many runs at least, so that small ones are spread too."""


class Cursor:
    """Walks the items that nobody has claimed yet.

    First it goes through *runs* of consecutive items that nobody has begun: one listing finds the next such run,
    from the last claim on. When every run has been begun it helps with what is left of them, from the end, while
    their owners go on from the start. Parties that meet anyway spread out over twice as many items each time.
    """

    def __init__(self, mailbox: Mailbox, keys: QueueKeys, count: int, *, clock: Clock, rng: random.Random, fresh_for: float) -> None:
        self._mailbox = mailbox
        self._keys = keys
        self._count = count
        self._clock = clock
        self._rng = rng
        self._fresh_for = fresh_for
        self._run = max(1, min(_LARGEST_RUN, count // _RUNS))

    def take(self, claim: Callable[[int], T | None]) -> Iterator[T]:
        """Offer free places to ``claim``, which gives None where another was quicker, and yield what it gives.

        Ends when every place has been claimed by somebody.
        """
        yield from self._untouched_runs(claim)
        yield from self._rest(claim)

    def _untouched_runs(self, claim: Callable[[int], T | None]) -> Iterator[T]:
        start = 0
        while (found := self._next_untouched(start)) is not None:
            start = found
            for place in range(start, min(start + self._run, self._count)):
                if (claimed := claim(place)) is not None:
                    yield claimed
                elif place == start:  # another party has just begun here
                    break
            start += self._run

    def _next_untouched(self, start: int) -> int | None:
        for place in self._claimed(start):
            if place >= start + self._run:
                break
            if place >= start:
                start += self._run
        return start if start < self._count else None

    def _rest(self, claim: Callable[[int], T | None]) -> Iterator[T]:
        lowest, width = 0, 1
        while free := self._free(lowest):
            lowest, listed, refused = free[0], self._clock.monotonic(), 0
            # What was listed a while ago has been taken by others meanwhile.
            while free and refused < 3 and (not refused or self._clock.monotonic() - listed < self._fresh_for):
                place = free.pop(-1 - self._rng.randrange(min(width, len(free))))
                if (claimed := claim(place)) is not None:
                    refused, width = 0, max(1, width // 2)
                    yield claimed
                else:
                    refused, width = refused + 1, width * 2

    def _free(self, lowest: int) -> list[int]:
        taken = set(self._claimed(lowest))
        return [place for place in range(lowest, self._count) if place not in taken]

    def _claimed(self, start: int) -> Iterator[int]:
        """The claimed places from ``start`` on, in order; 1,000 a request."""
        for key in self._mailbox.list(self._keys.claims(), after=self._keys.claims_from(start)):
            try:
                yield int(parse_claim(key).item)
            except (InvalidName, ValueError):  # not ours
                continue
