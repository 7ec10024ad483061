"""A learner's own books beside the session's: what it has done to the model, and where that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gradientmail_torch.session import Session
from gradientmail_torch.session.replica import Fragment, Replica, Work
from gradientmail_torch.testing.training.ledger import Ledger
from gradientmail_torch.testing.training.replay import same_bits
from gradientmail_torch.testing.training.violations import Invariant, Violation

_SLACK = 0.05  # a step moves by 1; what fp32 loses in an addition is far below


class FragmentBooks:
    """``parameters − base`` is what was done and is in no commit that was adopted."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.done = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors]
        """Since the last time that all was taken over or discarded."""
        self.since, self.flying = Work(), Work()
        self.merged, self.discarded = Work(), Work()
        self.nonce = ""
        """Of the contribution on its way."""
        self.broken = False
        """Whether the parameters are not finite."""

    def clear(self) -> None:
        for each in self.done:
            each.zero_()
        self.broken = False


class Books:
    """Follows a session from inside its process: what it takes as a contribution, what it adopts, step by step."""

    def __init__(self, who: str, session: Session, model: nn.Module, ledger: Ledger) -> None:
        assert session._replica is not None
        self.who = who
        self.session = session
        self.replica: Replica = session._replica
        self._ledger = ledger
        self._rule = session.algorithm.adoption_rule
        named = dict(model.named_parameters())
        self.fragments = [FragmentBooks([named[spec.name].detach() for spec in fragment.specs]) for fragment in self.replica.fragments]
        self.steps = 0
        self.violation: Violation | None = None
        """The first one, which is told again by whatever is asked of a broken learner."""
        self._contribute, self._adopt = self.replica.contribute, self.replica.adopt
        self.replica.contribute, self.replica.adopt = self._contributed, self._adopted  # type: ignore[method-assign]
        for fragment, books in zip(self.replica.fragments, self.fragments, strict=True):
            ledger.check_adopted(who, fragment.index, fragment.version, fragment.nonce, fragment.values)
            if not same_bits(books.tensors, fragment.values):
                raise self._broken(f"joined with {books.tensors}, not {fragment.values}")

    def stepped(self, samples: int, change: Sequence[Sequence[Tensor]]) -> None:
        """An optimizer step has changed the parameters of each fragment; called before ``session.step``."""
        self.steps += 1
        for books, of_fragment in zip(self.fragments, change, strict=True):
            books.since = books.since + Work(1, samples)
            for done, by in zip(books.done, of_fragment, strict=True):
                done.add_(by)
                books.broken |= not bool(torch.isfinite(by).all())

    # --- what the session does -------------------------------------------------------------------------

    def _contributed(self, fragment: Fragment, nonce: str) -> None:
        with self._first_violation():
            self._take(fragment, nonce)

    def _adopted(self, fragment: Fragment) -> bool:
        with self._first_violation():
            changed = self._adopt(fragment)
            if changed:
                self._ledger.check_adopted(self.who, fragment.index, fragment.version, fragment.nonce, fragment.values)
                self._settle(fragment, self.fragments[fragment.index])
                self._check(fragment)
            return changed

    @contextmanager
    def _first_violation(self) -> Iterator[None]:
        """The session, which leaves the run after an error, must not hide it behind what follows from it."""
        if self.violation is not None:
            raise self.violation
        try:
            yield
        except Violation as violation:
            self.violation = violation
            raise

    def _take(self, fragment: Fragment, nonce: str) -> None:
        staged = fragment.staged
        ready = staged is not None and staged.correction is not None and staged.prepared_for == fragment.state()
        self._contribute(fragment, nonce)
        if ready:
            raise Violation(
                Invariant.ADOPT_FIRST, f"{self.who} contributes to fragment {fragment.index} before it adopts version {fragment.known}"
            )
        books = self.fragments[fragment.index]
        self._require(not books.nonce, f"contributes to fragment {fragment.index} while {books.nonce} is on its way")
        held_back = _held_back(fragment, books.since)
        books.nonce, books.flying, books.since = nonce, books.since - held_back, held_back

    def _settle(self, fragment: Fragment, books: FragmentBooks) -> None:
        """Work out by the commits what has become of the contribution."""
        left_out = self._ledger.left_out.get(books.nonce)
        gone = bool(books.nonce) and fragment.pending is None
        brought: list[Tensor] = []
        if gone and books.nonce in self._ledger.merged:
            self._require(self._ledger.merged[books.nonce][1] <= fragment.version, f"knows of {books.nonce} before it adopts it")
            books.merged, books.flying = books.merged + books.flying, Work()
            brought = self._ledger.delta(fragment.index, books.nonce)
            for done, by in zip(books.done, brought, strict=True):
                done.sub_(by)
        elif gone and left_out is not None and left_out.retry:
            books.since, books.flying = books.since + books.flying, Work()
        elif gone and left_out is None and not books.broken:
            raise Violation(Invariant.BOOKS, f"{self.who} forgets its contribution {books.nonce}, which is in no commit")
        elif not gone and self._ledger.merged.get(books.nonce, (0, fragment.version + 1))[1] <= fragment.version:
            raise Violation(Invariant.BOOKS, f"{self.who} has adopted version {fragment.version} and takes {books.nonce} for open")
        if gone:
            books.nonce = ""
        if (gone and books.flying.steps) or self._rule == "overwrite":
            books.discarded, books.since = books.discarded + books.since, Work()
            if gone:
                books.discarded, books.flying = books.discarded + books.flying, Work()
            books.clear()
        elif not books.since.steps and not books.flying.steps:
            self._require_rounding(fragment, books, brought)
            books.clear()
        else:
            return
        if not same_bits(books.tensors, fragment.values):
            raise self._broken(f"has nothing of its own on fragment {fragment.index}, and yet {books.tensors}")

    def _require_rounding(self, fragment: Fragment, books: FragmentBooks, brought: Sequence[Tensor]) -> None:
        """All is in the commit: what is dropped now is what the wire format lost of it."""
        for done, by in zip(books.done, brought or books.done, strict=True):
            room = _SLACK + 2.0**-7 * by.abs().double() + _SLACK * self.steps / 100
            if not bool((done.abs() <= room).all()):
                raise self._broken(f"loses {done} of fragment {fragment.index}")

    # --- what must hold --------------------------------------------------------------------------------

    def check(self) -> None:
        with self._first_violation():
            self._check()

    def _check(self, *fragments: Fragment) -> None:
        for fragment in fragments or self.replica.fragments:
            books, pending = self.fragments[fragment.index], fragment.pending
            self._require(
                self.replica.uncontributed(fragment) == books.since, f"holds {self.replica.uncontributed(fragment)}, not {books.since}"
            )
            flying = pending.work if pending is not None else Work()
            self._require(flying == books.flying, f"has {flying} on its way, not {books.flying}")
            if not books.broken and self._rule == "rebase":
                for tensor, base, done in zip(books.tensors, fragment.base, books.done, strict=True):
                    off = (tensor.double() - base.double() - done).abs()
                    room = _SLACK + 1e-5 * float(base.abs().max() + tensor.abs().max())
                    if not bool((off <= room).all()):
                        raise self._broken(f"has {tensor} of fragment {fragment.index} on {base}, not {done} more")
        tally = self.replica.tally
        if not fragments:
            self._require(tally.merged_work == sum((b.merged for b in self.fragments), Work()), f"counts {tally.merged_work} as merged")
            self._require(
                tally.discarded_work == sum((b.discarded for b in self.fragments), Work()), f"counts {tally.discarded_work} as lost"
            )
            for books in self.fragments:
                parts = books.merged + books.discarded + books.since + books.flying
                self._require(parts.steps == self.steps, f"has done {self.steps} steps and accounts for {parts}")

    def check_closed(self) -> None:
        """A learner that has closed has left nothing outside of the run."""
        self.check()
        for fragment, books in zip(self.replica.fragments, self.fragments, strict=True):
            if (books.since + books.flying).steps:
                text = f"{self.who} has closed with {books.since} and {books.flying} of fragment {fragment.index} in no commit"
                raise Violation(Invariant.COMPLETE, text)

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise self._broken(text)

    def _broken(self, text: str) -> Violation:
        return Violation(Invariant.BOOKS, f"{self.who} {text}")


def _held_back(fragment: Fragment, work: Work) -> Work:
    """A step of mean size stands for what a sparse contribution leaves out, until one that leaves out nothing takes it along."""
    sparse = fragment.pending is not None and fragment.pending.wire == "sparse"
    return Work(1, work.samples // work.steps) if sparse else Work()
