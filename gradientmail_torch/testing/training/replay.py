"""What sums and commits should hold, worked out again from what their contributions hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradientmail_torch.algorithms import Algorithm, wire
from gradientmail_torch.algorithms.merge import Sums, Weighted, combined, merge, summed
from gradientmail_torch.messages import Commit, Contribution, DataRef, LeftOut, Merged, Partial, TensorSpec
from gradientmail_torch.session.crowd import GROWN
from gradientmail_torch.session.parameters import difference, total
from gradientmail_torch.session.run import outer_specs
from gradientmail_torch.testing.training import arithmetic
from gradientmail_torch.testing.training.violations import Invariant, Violation

_SEEN_BY = 1e-6  # relative; what float64 and fp32 make of the same numbers may differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Of one round."""

    algorithm: Algorithm
    specs: tuple[TensorSpec, ...]
    objects: Mapping[str, bytes]
    """All data that was ever written, by key."""
    records: Mapping[str, Contribution]
    """All that were ever in the round, by learner."""
    partials: Mapping[str, Partial]
    """Sums made ahead, by the key of their data."""

    def check_sums(self, key: str, partial: Partial) -> None:
        sums, radii = arithmetic.summed(self._read(partial.merged, partial.left_out), partial.method)
        for found, should in zip(self._tensors(partial.data), sums, strict=True):
            _require_close(f"the sum {key}", found, should, should, 0.0)
        if any(abs(found - should) > 1e-4 * (1 + should) for found, should in zip(partial.radii, radii, strict=True)):
            raise Violation(Invariant.REPLAY, f"{key} has radii {partial.radii}; its contributions make {radii}")

    def value(self, key: str, commit: Commit, before: Sequence[Tensor]) -> list[Tensor]:
        """What a commit that follows the value ``before`` says that the fragment is."""
        found = []
        if commit.update is not None:
            found.append(total(before, self._tensors(commit.update), self.specs))
        if commit.parameters is not None:
            found.append(self._tensors(commit.parameters))
        if not found or not same_bits(found[0], found[-1]):
            raise Violation(Invariant.SAME_BITS, f"{key} has no value, or two")
        return found[0]

    def check(self, key: str, commit: Commit, previous: Commit | None, before: list[Tensor], values: list[Tensor]) -> None:
        """The value is what the contributions make: nearly by float64 and the papers, to the last bit by the same code."""
        *_, alone = in_sums(commit)
        reads = [self._read(partial.merged, partial.left_out) for partial in (self.partials[a.data.key] for a in commit.ahead)]
        reads.append(self._read(alone, commit.left_out))
        self._check_method(key, commit, previous, listed=len(reads[-1][1]))
        state, after_state = self._state(previous), self._state(commit)
        if not commit.merged:
            if not same_bits(values, before) or not same_bits(state or [], after_state or []):
                raise Violation(Invariant.REPLAY, f"{key} merges nothing, and changes the fragment")
            return
        merged = arithmetic.merged(reads, commit.method)
        expected, velocities = arithmetic.outer_step(self.algorithm.outer, before, merged, state, commit.version)
        rounding = 0.0 if self.algorithm.commit_wire == "fp32" else 2.0**-7
        for value, should, start in zip(values, expected, before, strict=True):
            _require_close(key, value, should, start, rounding)
        if self.algorithm.outer.stateful and after_state is None:
            raise Violation(Invariant.REPLAY, f"{key} has no outer state")
        for after, velocity in zip(after_state or [], velocities, strict=False):
            _require_close(f"the outer state of {key}", after, velocity, velocity, 0.0)
        again, state_again = self._again(key, commit, before, state)
        if not same_bits(again, values) or not same_bits(state_again or [], after_state or []):
            raise Violation(Invariant.REPLAY, f"{key}, replayed, gives other bits: {again}, not {values}")

    def _check_method(self, key: str, commit: Commit, previous: Commit | None, *, listed: int) -> None:
        """By the contributions that were read, or where groups were summed ahead, by how many were expected."""
        counts = [listed]
        if commit.ahead:
            before = len(previous.merged) if previous is not None else 0
            counts = [before, GROWN * max(before, self.algorithm.fan_in) + 1]
        right = {arithmetic.method(self.algorithm.merge, count) for count in counts}
        if commit.method not in right:
            raise Violation(Invariant.REPLAY, f"{key} merges by {commit.method}, not by {' or '.join(sorted(right))}")

    def _again(
        self, key: str, commit: Commit, before: list[Tensor], state: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The value and the outer state that the same code makes of the same records."""
        specs, commit_wire = self.specs, self.algorithm.commit_wire
        method: Any = commit.method

        def parts() -> Iterator[Weighted | Sums]:
            each = map(self._weighted, commit.merged)
            if commit.ahead:
                yield combined([summed(islice(each, ahead.contributions), specs, method) for ahead in commit.ahead], specs)
            yield from each

        again, state_again = self.algorithm.outer.step(before, merge(parts, specs, method), state, specs, commit.version)
        if commit_wire != "fp32":
            sent = wire.encode(difference(again, before, specs), specs, commit_wire)
            again = total(before, wire.decode(sent, specs, commit_wire, key=key), specs)
        return again, state_again

    def _weighted(self, merged: Merged) -> Weighted:
        norms = self.records[merged.learner_id].norms
        return Weighted(weight=merged.weight, tensors=self._tensors(merged.data), norms=norms, clips=merged.clips)

    def _read(self, merged: Sequence[Merged], left_out: Sequence[LeftOut]) -> arithmetic.Read:
        """What one learner has read of the round."""
        mine = [self._part(each.learner_id) for each in merged]
        return mine, [*mine, *(self._part(each.learner_id) for each in left_out)]

    def _part(self, learner_id: str) -> arithmetic.Part:
        record = self.records[learner_id]
        return arithmetic.Part(steps=record.steps, samples=record.samples, deltas=self._tensors(record.data))

    def _state(self, commit: Commit | None) -> list[Tensor] | None:
        """The outer optimizer's after a commit."""
        return None if commit is None or commit.outer is None else tensors(self.objects, commit.outer, outer_specs(self.specs))

    def _tensors(self, ref: DataRef) -> list[Tensor]:
        return tensors(self.objects, ref, self.specs)


def tensors(objects: Mapping[str, bytes], ref: DataRef, specs: Sequence[TensorSpec]) -> list[Tensor]:
    return wire.decode(objects[ref.key], specs, ref.wire, key=ref.key)


def in_sums(commit: Commit) -> list[list[Merged]]:
    """The contributions of a commit by who has read them: those of each sum ahead, then those of the syncer."""
    each = iter(commit.merged)
    return [*([*islice(each, ahead.contributions)] for ahead in commit.ahead), [*each]]


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(a, b, strict=True))


def _require_close(what: str, value: Tensor, should: Tensor, start: Tensor, rounding: float) -> None:
    room = 1e-3 + _SEEN_BY * float(start.abs().max() + should.abs().max()) + rounding * (should - start.double()).abs()
    if not bool(((value.double() - should).abs() <= room).all()):
        raise Violation(Invariant.REPLAY, f"{what} is {value}; its contributions make {should}")
