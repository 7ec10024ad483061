"""``gradientmail replay --verify``: make the commits again from the contributions, and compare them bit for bit.

The order of summation is recorded, so the same bytes must come out; sums of other machines may differ in the last
bit where RDA or clipping takes norms. Needs torch, which is loaded when it is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from gradientmail_torch import keys
from gradientmail_torch.errors import CorruptObject, RunMismatch
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Commit, Contribution, DataRef, Merged, read

if TYPE_CHECKING:
    from torch import Tensor

    from gradientmail_torch.algorithms.merge import Sums, Weighted
    from gradientmail_torch.session.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What could be made again of one fragment."""

    fragment: int
    from_version: int
    """0 is the initial value. Where retention has removed contributions, the verification begins behind them."""
    to_version: int
    problem: str = ""
    """The first difference; empty when every commit is what its contributions make."""

    @property
    def commits(self) -> int:
        return self.to_version - self.from_version

    def in_words(self) -> str:
        where = f"fragment {self.fragment}"
        if self.problem:
            return f"{where}: {self.problem}"
        if not self.commits:
            return f"{where}: nothing to compare: the contributions have been removed (sessions with keep=None keep them)"
        start = "the initial value" if self.from_version == 0 else f"version {self.from_version}, the contributions before it being removed"
        return f"{where}: versions {self.from_version + 1} to {self.to_version} made again, bit for bit, from {start}"


class _Gone(Exception):
    """Retention has removed what is needed."""


def verify(mailbox: Mailbox, commits: tuple[Commit, ...]) -> list[Verified]:
    """Verify every fragment of the run in ``mailbox``, of which ``commits`` are all."""
    from gradientmail_torch.session.run import Run

    run = Run.open(mailbox)
    if run is None:
        raise RunMismatch(f"{mailbox!r} holds no run")
    return [_verify(run, [commit for commit in commits if commit.fragment == index]) for index in range(len(run.layout)) if commits]


def _verify(run: Run, commits: list[Commit]) -> Verified:
    fragment = commits[0].fragment if commits else 0
    begun = 0
    state: list[Tensor] | None = None
    values: list[Tensor] | None = run.initial(fragment)
    for commit in commits:
        try:
            if values is None:
                raise _Gone
            values, state, problem = _again(run, commit, values, state)
            if problem:
                return Verified(fragment=fragment, from_version=begun, to_version=commit.version - 1, problem=problem)
        except _Gone:  # begin anew behind this commit, if its own value is still there
            begun = commit.version
            values, state = _as_committed(run, commit)
    return Verified(fragment=fragment, from_version=begun, to_version=commits[-1].version if commits else 0)


def _as_committed(run: Run, commit: Commit) -> tuple[list[Tensor] | None, list[Tensor] | None]:
    """What the mailbox holds of a commit; None where part of it has been removed."""
    try:
        values = run.values(commit)
        return values, run.outer_state(commit) if values is not None else None
    except CorruptObject:
        return None, None


def _again(run: Run, commit: Commit, before: list[Tensor], state: list[Tensor] | None) -> tuple[list[Tensor], list[Tensor] | None, str]:
    """The value and outer state that a commit's contributions make, and in what they differ from its record."""
    from gradientmail_torch.algorithms import OuterSGD, wire
    from gradientmail_torch.algorithms.merge import merge
    from gradientmail_torch.session.parameters import difference, total
    from gradientmail_torch.session.run import outer_specs

    specs = run.layout[commit.fragment]
    settings = {name.removeprefix("outer."): value for name, value in run.manifest.algorithm.items() if name.startswith("outer.")}
    values = before
    problems: list[str] = []
    if commit.merged:
        merged = merge(lambda: _parts(run, commit, problems), specs, commit.method)  # type: ignore[arg-type]
        values, state = OuterSGD(**settings).step(before, merged, state, specs, commit.version)  # type: ignore[arg-type]
    if commit.update is not None:
        data = wire.encode(difference(values, before, specs), specs, commit.update.wire)
        problems.append(_compare(commit, "update", commit.update, data))
        values = total(before, wire.decode(data, specs, commit.update.wire, key=commit.update.key), specs)
    for whole in (commit.parameters, commit.whole):
        if whole is not None:
            problems.append(_compare(commit, "parameters", whole, wire.encode(values, specs, whole.wire)))
    if commit.outer is not None and state is not None:
        problems.append(_compare(commit, "outer state", commit.outer, wire.encode(state, outer_specs(specs), commit.outer.wire)))
    return values, state, next(filter(None, problems), "")


def _parts(run: Run, commit: Commit, problems: list[str]) -> Iterator[Weighted | Sums]:
    """What the syncer has summed: sums that others had made, and contributions. Differences are added to ``problems``."""
    from gradientmail_torch.algorithms import wire
    from gradientmail_torch.algorithms.merge import combined, summed

    specs = run.layout[commit.fragment]
    each = _contributions(run, commit, problems)

    def ahead() -> Iterator[Sums]:
        for part in commit.ahead:
            sums = summed(islice(each, part.contributions), specs, commit.method)  # type: ignore[arg-type]
            problems.append(_compare(commit, f"sums by {part.by}", part.data, wire.encode(sums.tensors, specs, part.data.wire)))
            yield sums

    if commit.ahead:
        yield combined(ahead(), specs)
    yield from each


def _contributions(run: Run, commit: Commit, problems: list[str]) -> Iterator[Weighted]:
    from gradientmail_torch.algorithms.merge import Weighted, norms

    specs = run.layout[commit.fragment]
    for merged in commit.merged:
        tensors = run.tensors(merged.data, specs)
        if tensors is None:
            raise _Gone
        record = _record(run, commit, merged)
        if record is not None and _offered(record) != _offered(merged):
            problems.append(
                f"version {commit.version}, merged by {commit.by}, names other work or data of {merged.learner_id} than it has offered"
            )
        stated = record.norms if record is not None else norms(tensors, specs)
        yield Weighted(weight=merged.weight, tensors=tensors, norms=stated, clips=merged.clips)


def _record(run: Run, commit: Commit, merged: Merged) -> Contribution | None:
    """What a learner has offered, where it is still there: retention removes it, and another life may have offered since."""
    record = read(run.mailbox, Contribution, keys.contribution(commit.fragment, commit.version, merged.learner_id))
    return record if record is not None and record.nonce == merged.nonce else None


def _offered(part: Contribution | Merged) -> tuple[int, int, float, DataRef]:
    return part.steps, part.samples, part.weight, part.data


def _compare(commit: Commit, what: str, ref: DataRef, data: bytes) -> str:
    if hashlib.sha256(data).hexdigest() == ref.sha256:
        return ""
    return f"the {what} of version {commit.version}, merged by {commit.by}, are not what its contributions make"
