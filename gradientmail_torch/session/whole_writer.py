"""Writes the whole value of a fragment behind a commit that holds an update, so that who joins reads one value.

The commit names it by length and digest and does not wait for it: update and commit go first. Where its author dies in
between, or has no uplink to spare, the object is missing, and readers make the value of an older one and the updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.clock import Clock
from gradientmail_torch.messages import Commit, DataRef
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.run import Run

SHARE = 1 / 8
"""Part of its time for which a learner's uplink may be busy with whole values: contributions need it."""
_IDLE_S = 60.0


class _Offer(NamedTuple):
    """The values of a commit that this learner has made, and where they belong."""

    version: int
    ref: DataRef
    values: list[Tensor]


class WholeWriter:
    def __init__(self, run: Run, replica: Replica, *, uplink: Callable[[], float], poll_interval: float, clock: Clock) -> None:
        """``uplink`` gives the bytes per second of this learner's uploads so far, 0 when unknown."""
        self._run = run
        self._replica = replica
        self._uplink = uplink
        self._poll_interval = poll_interval
        self._clock = clock
        self._began = clock.monotonic()
        self._busy_s = 0.0
        self._offers: dict[int, _Offer] = {}

    def offer(self, fragment: Fragment, commit: Commit, values: list[Tensor]) -> None:
        """``values`` are those of a commit that this learner has made."""
        if commit.whole is not None:
            self._offers[fragment.index] = _Offer(commit.version, commit.whole, values)

    def tick(self) -> float:
        for fragment in self._replica.fragments:
            offer = self._offers.get(fragment.index)
            if offer is None:
                continue
            if fragment.known > offer.version or self._write(fragment, offer):  # who joins now begins with the newer one
                self._drop(fragment, offer)
        return self._poll_interval if self._offers else _IDLE_S

    def _drop(self, fragment: Fragment, offer: _Offer) -> None:
        if self._offers.get(fragment.index) is offer:  # the syncer may have put the next one there
            del self._offers[fragment.index]

    def _write(self, fragment: Fragment, offer: _Offer) -> bool:
        """False when the uplink is wanted for something else."""
        began = self._clock.monotonic()
        uplink = self._uplink()
        takes_s = offer.ref.size / uplink if uplink > 0 else 0.0
        if self._contributes() or self._busy_s + takes_s > SHARE * (began - self._began):
            return False
        self._run.mailbox.put(offer.ref.key, wire.encode(offer.values, fragment.specs, offer.ref.wire))
        self._busy_s += self._clock.monotonic() - began
        return True

    def _contributes(self) -> bool:
        """Whether a contribution is being uploaded."""
        pending = [fragment.pending for fragment in self._replica.fragments]
        return any(each is not None and each.record is None and each.outcome is Outcome.OPEN for each in pending)
