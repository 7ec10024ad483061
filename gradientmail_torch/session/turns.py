"""Whose turn it is to merge an open round: the order, and who has claimed it.

Claims only save double work: a superseded owner may finish, and correctness rests on a commit being created once
and never deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from gradientmail_torch import keys
from gradientmail_torch.algorithms.quorum import merge_order
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.messages import Claim, encode, read
from gradientmail_torch.session.observer import Peer
from gradientmail_torch.session.patience import Wait
from gradientmail_torch.session.run import Run
from gradientmail_torch.session.settings import Settings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Turn:
    """What this learner has seen of the claims of one open round, by its own clock."""

    seen_at: float
    """When the round was first seen."""
    free_since: float | None = None
    """Since when the round could be merged and nobody who is alive has claimed it."""
    attempt: int = 1
    """Number of the next claim."""
    claim: Claim | None = None
    """The last claim."""
    claim_at: float = 0.0
    place: int | None = None
    """This learner's in the order as it was when first asked for; only in large runs."""
    wait: Wait | None = None
    """For another's claim, from when this learner's turn could have come; only in large runs."""


class Turns:
    def __init__(self, run: Run, life: keys.Life, *, settings: Settings, clock: Clock) -> None:
        self._run = run
        self._life = life
        self._settings = settings
        self._clock = clock

    def has_come(self, fragment: int, version: int, turn: Turn, live: Mapping[str, Peer], now: float) -> bool:
        """Whether it is this learner's turn: the k-th in the order waits k × ``claim_delay`` for those before it."""
        if turn.claim is not None:
            if self._is_ours(turn.claim):
                return True  # an attempt of ours that was cut short
            if turn.free_since is None and not self._is_stale(turn.claim, turn.claim_at, live, now):
                return False
        turn.free_since = now if turn.free_since is None else turn.free_since
        place = self._place(fragment, version, live, without=turn.claim.learner_id if turn.claim else "")
        return now - turn.free_since >= place * self._settings.claim_delay

    def may_have_come(self, fragment: int, version: int, turn: Turn, live: Mapping[str, Peer]) -> bool:
        """The same as far as one knows without a look at who has contributed: whether to take that look.

        The k-th in the order does not look for k × ``claim_delay``, and then asks for a claim first: that costs less.
        """
        now = self._clock.monotonic()
        if turn.claim is not None:
            return self._is_ours(turn.claim) or turn.free_since is not None or self._is_stale(turn.claim, turn.claim_at, live, now)
        if turn.place is None:
            turn.place = self._place(fragment, version, live)
        if now - turn.seen_at < turn.place * self._settings.claim_delay:
            return False
        return turn.place == 0 or not self._seems_claimed(fragment, version, turn, now)

    def _seems_claimed(self, fragment: int, version: int, turn: Turn, now: float) -> bool:
        """Whether somebody before this learner has claimed the round; taken for granted between two looks."""
        turn.wait = turn.wait or Wait(now)
        if not turn.wait.is_time(now):
            return True
        claim = self._read(keys.claim(fragment, version, turn.attempt))
        if claim is None:
            return False
        self._note(turn, claim)
        return True

    def claim(self, fragment: int, version: int, turn: Turn) -> bool:
        """Claim the round; False when another has claimed it first."""
        if turn.claim is not None and self._is_ours(turn.claim):
            return True
        key = keys.claim(fragment, version, turn.attempt)
        mine = Claim(nonce=uuid4().hex, learner_id=self._life.learner_id, generation=self._life.generation)
        won = self._run.mailbox.put_if_absent(key, encode(mine))
        self._note(turn, mine if won else self._read(key))
        return won

    def _note(self, turn: Turn, claim: Claim | None) -> None:
        turn.claim = claim
        turn.claim_at, turn.free_since = self._clock.monotonic(), None
        turn.attempt += 1

    def _read(self, key: str) -> Claim | None:
        try:
            return read(self._run.mailbox, Claim, key)
        except CorruptObject as error:
            log.warning("a claim cannot be read and counts as void: %s", error)
            return None

    def _place(self, fragment: int, version: int, live: Mapping[str, Peer], *, without: str = "") -> int:
        """This learner's place in the order; the owner of a claim that holds no more is not in it."""
        uplinks = {i: peer.beat.uplink for i, peer in live.items() if peer.beat.state != "joining" and i != without}
        uplinks.setdefault(self._life.learner_id, 0.0)
        return merge_order(self._run.manifest.nonce, fragment, version, uplinks).index(self._life.learner_id)

    def _is_ours(self, claim: Claim) -> bool:
        return (claim.learner_id, claim.generation) == self._life

    def _is_stale(self, claim: Claim, claimed_at: float, live: Mapping[str, Peer], now: float) -> bool:
        """Whether a claim's owner is silent or superseded, or has had ``merge_timeout`` seconds."""
        owner = live.get(claim.learner_id)
        gone = owner is None or owner.generation != claim.generation
        return gone or now - claimed_at >= self._settings.merge_timeout
