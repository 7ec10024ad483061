"""What a learner of many lists of the open rounds: only what may concern it, since all would grow with their number."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby, islice

from gradientmail_torch import keys
from gradientmail_torch.errors import InvalidName
from gradientmail_torch.mailbox import Mailbox

PAGE_KEYS = 1000
"""Keys that a store lists at one request."""
LISTED_WHOLLY = PAGE_KEYS
"""So many records at most may be open where a learner lists all of them."""


def is_large(learners: int, fragments: int) -> bool:
    """Whether so many records may be open that each learner looks only at what may concern it."""
    return learners * fragments > LISTED_WHOLLY


def opened_rounds(mailbox: Mailbox, known: Mapping[int, int], begin: int) -> tuple[list[str], int]:
    """A page of the listing, enough to see which rounds have been opened of those fragments in ``known`` that it reaches.

    ``known`` gives the newest version of each fragment that matters. The page is that from fragment ``begin`` on, or from
    the first where nothing that matters is behind it; returned is also where the next look begins. One page a look: a
    round of a thousand fills it, and to leap on at once would cost a request for each fragment. Of each round there are
    two records: one may be this learner's, of an earlier life.
    """
    if not known:
        return [], 0
    place = min((index for index in known if index >= begin), default=min(known))
    page = list(islice(mailbox.list(keys.ROUNDS, after=keys.round_prefix(place, known[place] + 1)), PAGE_KEYS))
    found = [key for _, of_round in groupby(page, key=lambda key: key.rpartition("/")[0]) for key in islice(of_round, 2)]
    if len(page) < PAGE_KEYS:
        return found, 0
    last, version = _place(page[-1])
    if last in known and version <= known[last] and last > place:
        return found, last  # what filled the page is swept away soon
    return found, max(place, last) + 1


def contributions(mailbox: Mailbox, fragment: int, version: int) -> list[str]:
    """Everything in one round."""
    return list(mailbox.list(keys.round_prefix(fragment, version)))


def _place(key: str) -> tuple[int, int]:
    try:
        found = keys.parse_round(key)
        return found.fragment, found.version
    except InvalidName:  # not ours
        return -1, -1
