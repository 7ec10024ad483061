"""The contributions of a round that is being merged: read, checked, and streamed one at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.merge import OUT_OF_PROPORTION, Sums, Weighted, clip_factors, combined, is_sound, norms
from gradientmail_torch.errors import CorruptObject, InvalidName
from gradientmail_torch.messages import Contribution, LeftOut, Merged, Partial, TensorSpec, read
from gradientmail_torch.session.partials import load_sums
from gradientmail_torch.session.run import Run

log = logging.getLogger(__name__)

NORM_TOLERANCE = 0.01
"""How far a stated norm may be from the real one, relatively; clipping goes by the stated ones."""
MAX_UNREADABLE = 1000
"""How many records that cannot be read a commit names, so that strangers' objects cannot make it too long to be read."""


class Own(NamedTuple):
    """The syncer's own contribution, which need not be fetched: the record holds a digest of exactly this."""

    record: Contribution
    sent: bytes


class ClosingRound:
    """Everything here is untrusted: what does not hold is left out with its reason, and merging goes on."""

    def __init__(
        self,
        run: Run,
        fragment: int,
        version: int,
        before: Sequence[Tensor],
        own: Own | None = None,
        *,
        members: Collection[str] | None = None,
        partials: Sequence[Partial] = (),
    ) -> None:
        """
        Args:
            before: the fragment's committed value, which the contributions are deltas of.
            members: whose contributions are looked at; everyone's unless given.
            partials: records of contributions that were summed ahead. They have been read before the round is listed.
        """
        self._run = run
        self._before = before
        self._own = own
        self._fragment = fragment
        self._version = version
        self._specs: Sequence[TensorSpec] = run.layout[fragment]
        self.left_out: dict[str, LeftOut] = {}
        """By the key of the record."""
        self.merged: dict[str, Merged] = {}
        """By nonce, in the order of summation."""
        listed = self._list(members)
        self.partials: list[Partial] = []
        """Those of the sums ahead that hold, in the order of their groups."""
        self._ahead = self._sum_partials(partials, listed)
        in_sums = {merged.learner_id for merged in self.merged.values()}
        self.settled = {key for learner_id, key in listed.items() if learner_id in in_sums}
        """Keys of the records whose contributions are in those sums, and of the sums: a commit takes their place."""
        for partial in partials:
            self.settled |= {keys.partial(fragment, version, partial.group), partial.data.key}
        self.records = self._read_records({i: key for i, key in listed.items() if i not in in_sums})
        """Admissible so far of the others, by key, in the order of their nonces, so that a merge can be replayed."""

    def _list(self, members: Collection[str] | None) -> dict[str, str]:
        """Keys of records by learner."""
        found: dict[str, str] = {}
        for key in self._run.mailbox.list(keys.round_prefix(self._fragment, self._version)):
            with suppress(InvalidName):  # not ours
                learner_id = keys.parse_contribution(key).last
                if members is None or learner_id in members:
                    found[learner_id] = key
        return found

    def _sum_partials(self, partials: Sequence[Partial], listed: Collection[str]) -> Sums | None:
        """Load and add the sums one after the other."""

        def sound() -> Iterator[Sums]:
            for partial in partials:
                there = all(merged.learner_id in listed and merged.nonce not in self.merged for merged in partial.merged)
                sums = load_sums(self._run, partial, self._before, self._sizes) if there else None
                if sums is not None:
                    self.partials.append(partial)
                    self.merged |= {merged.nonce: merged for merged in partial.merged}
                    yield sums

        ahead = combined(sound(), self._specs)
        return ahead if self.partials else None

    def parts(self) -> Iterator[Weighted | Sums]:
        """All that is to be merged: the sums ahead as one, then the other contributions."""
        if self._ahead is not None:
            yield self._ahead
        yield from self.contributions()

    def _read_records(self, listed: Mapping[str, str]) -> dict[str, Contribution]:
        found: dict[str, Contribution] = {}
        nonces = {*self.merged}
        for learner_id, key in listed.items():
            try:
                record = read(self._run.mailbox, Contribution, key)
            except CorruptObject as error:
                if len(self.left_out) < MAX_UNREADABLE:
                    self._leave_out(key, "", learner_id, str(error))
                continue
            if record is None:
                continue
            problem = self._problem(record, learner_id, nonces)
            if problem:
                self._leave_out(key, record.nonce, learner_id, problem)
            else:
                found[key] = record
                nonces.add(record.nonce)
        return dict(sorted(found.items(), key=lambda item: item[1].nonce))

    def _problem(self, record: Contribution, learner_id: str, taken: Collection[str]) -> str:
        if record.learner_id != learner_id:
            return f"its record is that of {record.learner_id!r}"
        if record.nonce in taken:
            return "its nonce is that of another contribution"
        if len(record.norms) != len(self._specs):
            return f"it states {len(record.norms)} norms for {len(self._specs)} tensors"
        if not keys.is_delta_of(record.data.key, self._fragment, learner_id, record.nonce):
            return f"its data {record.data.key!r} is not in its place"
        return ""

    def contributions(self) -> Iterator[Weighted]:
        """Load one after the other. A second pass gives those that the first one accepted."""
        records = {key: record for key, record in self.records.items() if key not in self.left_out}
        clips = clip_factors([record.norms for record in records.values()], [record.steps for record in records.values()])
        for (key, record), clip in zip(records.items(), clips, strict=True):
            if self.merged and record.nonce in self.merged:
                clip = self.merged[record.nonce].clips
            tensors = self._load(key, record)
            if tensors is None:
                continue
            self.merged.setdefault(
                record.nonce,
                Merged(
                    nonce=record.nonce,
                    learner_id=record.learner_id,
                    generation=record.generation,
                    steps=record.steps,
                    samples=record.samples,
                    weight=record.weight,
                    data=record.data,
                    clips=clip,
                    anchor=record.anchor,
                ),
            )
            yield Weighted(weight=record.weight, tensors=tensors, norms=record.norms, clips=clip)

    def _load(self, key: str, record: Contribution) -> list[Tensor] | None:
        try:
            tensors = self._tensors(record)
        except CorruptObject as error:
            self._leave_out(key, record.nonce, record.learner_id, str(error))
            return None
        if tensors is None:
            self._leave_out(key, record.nonce, record.learner_id, "missing")
            return None
        problem = self._unsound(tensors, record)
        if problem:
            self._leave_out(key, record.nonce, record.learner_id, problem)
            return None
        return tensors

    def _tensors(self, record: Contribution) -> list[Tensor] | None:
        if self._own is None or record != self._own.record:
            return self._run.tensors(record.data, self._specs)
        return wire.decode(self._own.sent, self._specs, record.data.wire, key=record.data.key)

    def _unsound(self, tensors: Sequence[Tensor], record: Contribution) -> str:
        actual = norms(tensors, self._specs)
        each = zip(tensors, actual, record.norms, self._specs, self._before, self._sizes, strict=True)
        for tensor, norm, stated, spec, before, size in each:
            if not is_sound(tensor, norm, spec, before):
                return f"tensor {spec.name!r} is not finite"
            if abs(norm - stated) > NORM_TOLERANCE * max(norm, stated) + 1e-30:
                return f"tensor {spec.name!r} has norm {norm:.4g}, its record says {stated:.4g}"
            if norm > OUT_OF_PROPORTION * size:
                return f"tensor {spec.name!r} would move by {norm:.4g}, which is out of all proportion to its norm"
        return ""

    @cached_property
    def _sizes(self) -> list[float]:
        """By tensor, its norm, at least that of as many ones: what is zero at first may well grow."""
        return [max(norm, math.sqrt(spec.numel)) for norm, spec in zip(norms(self._before, self._specs), self._specs, strict=True)]

    def _leave_out(self, key: str, nonce: str, learner_id: str, reason: str) -> None:
        self.left_out[key] = LeftOut(nonce=nonce, learner_id=learner_id, reason=reason)
        log.warning("fragment %d, version %d: the contribution of %s is left out: %s", self._fragment, self._version, learner_id, reason)
