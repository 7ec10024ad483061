"""Gets contributions into the mailbox: data first, then a record in the round that is open.

The record, not the upload, chooses the round: when a round commits without it, the same data is recorded in the
next one, until a commit names it. Otherwise a node whose upload takes longer than a round would never contribute.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.algorithms.merge import is_sound, norms
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import TrainingDiverged
from gradientmail_torch.messages import Contribution, TensorSpec, encode, reference
from gradientmail_torch.session.parameters import difference
from gradientmail_torch.session.replica import Fragment, Pending, Replica
from gradientmail_torch.session.run import Run

log = logging.getLogger(__name__)

GIVES_UP_AFTER = 5
"""Contributions in a row to a fragment that are not finite."""


class Publisher:
    def __init__(
        self,
        run: Run,
        replica: Replica,
        life: keys.Life,
        *,
        poll_interval: float,
        clock: Clock,
        encoded: Callable[[], None],
        unsound: Callable[[], None],
    ) -> None:
        """``encoded`` is called when a contribution's bytes have become known, so that commits can be prepared.

        ``unsound`` is called when the training thread is to set a fragment back.
        """
        self._run = run
        self._replica = replica
        self._life = life
        self._poll_interval = poll_interval
        self._clock = clock
        self._encoded = encoded
        self._unsound = unsound
        self._discarded: Counter[int] = Counter()
        """By fragment, how many contributions in a row were not finite."""
        self.uplink = 0.0
        """Bytes per second of the uploads so far, a moving average."""

    def tick(self) -> float:
        for fragment in self._replica.fragments:
            pending = fragment.pending
            if pending is not None and pending.outcome is Outcome.OPEN:
                self._advance(fragment, pending)
        return self._poll_interval

    def _advance(self, fragment: Fragment, pending: Pending) -> None:
        if pending.record is None and not self._upload(fragment, pending):
            return
        with self._replica.lock:
            if pending.outcome is not Outcome.OPEN:
                return
            if pending.version <= fragment.known:
                # Set before the record is created, so that whoever reads that round's commit looks for it there.
                pending.version, pending.recorded = fragment.known + 1, False
            if pending.recorded:
                return  # in a round that is still open
            version = pending.version
        assert pending.record is not None
        # False when an earlier life of this ID is in that round: then this one goes into the next.
        self._run.mailbox.put_if_absent(keys.contribution(fragment.index, version, self._life.learner_id), encode(pending.record))
        pending.recorded = True

    def _upload(self, fragment: Fragment, pending: Pending) -> bool:
        """Encode and upload a contribution. False when it is not fit to be sent."""
        if fragment.reset:
            return False  # the training thread has not got there yet
        if pending.sent is None and not self._encode(fragment, pending):
            return False
        assert pending.sent is not None
        key = keys.data(fragment.index, fragment.known + 1, self._life.learner_id, pending.nonce, "delta")
        began = self._clock.monotonic()
        self._run.mailbox.put(key, pending.sent)
        self._measure(len(pending.sent), self._clock.monotonic() - began)
        pending.record = Contribution(
            nonce=pending.nonce,
            learner_id=self._life.learner_id,
            generation=self._life.generation,
            steps=pending.work.steps,
            samples=pending.work.samples,
            norms=tuple(norms(pending.delta(fragment.specs), fragment.specs)),
            anchor=pending.anchor,
            data=reference(key, pending.sent, wire=pending.wire),
        )
        return True

    def _encode(self, fragment: Fragment, pending: Pending) -> bool:
        """Work out the delta's bytes. False, and the fragment is to be set back, when it is not finite."""
        assert pending.snapshot is not None
        with self._replica.lock:
            base = fragment.base  # stays until the bytes are known: adoption waits for them
        delta = difference(pending.snapshot(), base, fragment.specs)
        unsound = _first_unsound(delta, base, fragment.specs)
        if unsound:
            with self._replica.lock:
                fragment.reset = True
            log.warning(
                "fragment %d: %d steps of this learner are not finite (tensor %r) and are discarded; its parameters are set back to "
                "version %d",
                fragment.index, pending.work.steps, unsound, fragment.version,
            )  # fmt: skip
            self._unsound()
            self._check_heals(fragment, unsound)
            return False
        del self._discarded[fragment.index]
        sent = wire.encode(delta, fragment.specs, pending.wire)
        with self._replica.lock:
            pending.sent, pending.snapshot = sent, None
        self._encoded()
        return True

    def _check_heals(self, fragment: Fragment, tensor: str) -> None:
        """The parameters have been set back each time: what is not finite must be the optimizer's own state, or the data."""
        self._discarded[fragment.index] += 1
        if self._discarded[fragment.index] >= GIVES_UP_AFTER:
            raise TrainingDiverged(
                f"the last {GIVES_UP_AFTER} contributions of this learner to fragment {fragment.index} are not finite (tensor {tensor!r}), "
                "though its parameters were set back each time, so its optimizer's state or its data is not finite. Restart this node: "
                "it then begins with the run's parameters and a new optimizer. A lower learning rate helps where it comes to this again"
            )

    def _measure(self, size_bytes: int, seconds: float) -> None:
        if seconds > 0:
            rate = size_bytes / seconds
            self.uplink = rate if self.uplink == 0 else 0.8 * self.uplink + 0.2 * rate


def _first_unsound(delta: Sequence[Tensor], base: Sequence[Tensor], specs: Sequence[TensorSpec]) -> str:
    """The name of the first tensor that is not finite; empty when all are."""
    each = zip(delta, norms(delta, specs), specs, base, strict=True)
    return next((spec.name for tensor, norm, spec, before in each if not is_sound(tensor, norm, spec, before)), "")
