"""An account of every object that a simulated run has ever held, and what must be true of them after each request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms import Algorithm
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import (
    Claim,
    Commit,
    Contribution,
    DataRef,
    LeftOut,
    Manifest,
    Merged,
    Partial,
    TensorSpec,
    decode,
    reference,
)
from gradientmail_torch.session.run import INITIAL_NONCE
from gradientmail_torch.testing.network import Event
from gradientmail_torch.testing.training.replay import Replay, in_sums, same_bits, tensors
from gradientmail_torch.testing.training.violations import Invariant, Violation

Round = tuple[int, int]
"""A fragment and the version that the round leads to."""

_CREATED_ONCE = {
    "commits": Invariant.ONE_COMMIT,
    "rounds": Invariant.COMPLETE,
    "claims": Invariant.COMPLETE,
    "partials": Invariant.REPLAY,
    "learners": Invariant.ONE_LIFE,
    "barriers": Invariant.BARRIER,
    keys.RUN: Invariant.ALIGNED,
}
"""What is broken where such an object changes, by the first segment of its key."""
_SWEEP_S = 150.0
"""Longer than any sweep, with the longest suspension of a process."""
_SEEN_BY = 1e-6  # relative; what float64 and fp32 make of the same numbers may differ by


class Ledger:
    """Is told of each request that takes effect, and remembers what the store forgets."""

    def __init__(
        self,
        store: MemoryMailbox,
        algorithm: Algorithm,
        *,
        keep: int | None,
        now_s: Callable[[], float],
        was_silent: Callable[[str, float], bool],
    ) -> None:
        self._store = store
        self._algorithm = algorithm
        self._keep = keep
        self._now_s = now_s
        self._was_silent = was_silent
        self.manifest: Manifest | None = None
        self.objects: dict[str, bytes] = {}
        """Every object of tensors that was ever written."""
        self._written_at: dict[str, float] = {}
        self._recorded_at: dict[str, float] = {}
        """When an object was last named by a new record."""
        self._bodies: dict[str, bytes] = {}
        """Of what is created once."""
        self.commits: dict[Round, Commit] = {}
        self.values: dict[Round, list[Tensor]] = {}
        self.newest: dict[int, int] = {}
        self.records: dict[Round, dict[str, Contribution]] = {}
        self.recorded_at: dict[Round, dict[str, float]] = {}
        self.merged: dict[str, Round] = {}
        """The round of every contribution that is in a commit, by nonce."""
        self.partials: dict[str, Partial] = {}
        """Sums made ahead of a merge, by the key of their data."""
        self.left_out: dict[str, LeftOut] = {}
        self.spoilt: set[str] = set()
        """Objects that somebody has altered or removed, by key."""
        self._generations: dict[str, int] = {}
        """The newest life of each learner."""
        self._claimed_at: dict[Round, dict[tuple[str, int], float]] = {}

    # --- requests ---------------------------------------------------------------------------------------

    def observed(self, event: Event) -> None:
        kind = event.key.partition("/")[0]
        if event.what == "put" and kind in ("data", "init"):
            self._written(event.key)
        elif event.what == "delete":
            self._deleted(event.key, kind)
        elif is_creation(event) and kind in _CREATED_ONCE:
            self._created(event.key, kind)

    def _written(self, key: str) -> None:
        body = self._store.get(key)
        assert body is not None
        self._written_at[key] = self._now_s()
        if self.objects.setdefault(key, body) != body:
            raise Violation(Invariant.KEPT, f"{key} was written anew with other bytes")
        if keys.is_whole(key):
            self._check_whole(key)

    def _check_whole(self, key: str) -> None:
        """A whole value that follows its commit is the commit's, to the last bit."""
        commit = self.commits.get(keys.parse_round(key)[:2])
        if commit is not None and commit.whole is not None and commit.whole.key == key:
            values = tensors(self.objects, commit.whole, self.specs(commit.fragment))
            self.check_values(f"the whole value {key}", commit.fragment, commit.version, values)
            if reference(key, self.objects[key], wire=commit.whole.wire) != commit.whole:
                raise Violation(Invariant.SAME_BITS, f"{key} is not what its commit names: nobody can read it")

    def _created(self, key: str, kind: str) -> None:
        body = self._store.get(key)
        assert body is not None
        if self._bodies.setdefault(key, body) != body:
            raise Violation(_CREATED_ONCE[kind], f"{key} was overwritten")
        try:
            self._read(key, kind, body)
        except CorruptObject as error:
            raise Violation(_CREATED_ONCE[kind], f"{key} cannot be read: {error}") from error

    def _read(self, key: str, kind: str, body: bytes) -> None:
        match kind:
            case "commits":
                self._committed(key, decode(Commit, body, key=key))
            case "rounds":
                self._recorded(key, decode(Contribution, body, key=key))
            case "claims":
                self._claimed(keys.parse_round(key)[:2], decode(Claim, body, key=key))
            case "partials":
                self._summed(key, decode(Partial, body, key=key))
            case "learners":
                life = keys.parse_life(key)
                self._generations[life.learner_id] = life.generation
            case keys.RUN:
                self._founded(decode(Manifest, body, key=key))

    def _deleted(self, key: str, kind: str) -> None:
        if kind == "commits":
            raise Violation(Invariant.ONE_COMMIT, f"{key} was deleted: who slept may create it again")
        if kind == "barriers":
            raise Violation(Invariant.BARRIER, f"{key} was deleted")
        if kind in ("learners", "run.json"):
            raise Violation(Invariant.ONE_LIFE, f"{key} was deleted")
        if kind in ("rounds", "claims", "partials"):
            fragment, version, _ = keys.parse_round(key)
            if version > self.newest.get(fragment, 0):
                raise Violation(Invariant.KEPT, f"{key} of an open round was deleted")
            self._bodies.pop(key, None)  # who comes late may make it again
        if kind == "init" and self.manifest is not None and key in {ref.key for ref in self.manifest.initial}:
            raise Violation(Invariant.KEPT, f"{key}, an initial value of the run, was deleted")
        if kind == "data" and not self._is_a_dead_learners(key):
            for ref, why in self._needed(keys.parse_round(key).fragment):
                if ref.key == key:
                    raise Violation(Invariant.KEPT, f"{key} was deleted: {why} names it")

    def _needed(self, fragment: int) -> Iterator[tuple[DataRef, str]]:
        """The data of a fragment that a commit within ``keep`` or an open record names."""
        newest = self.newest.get(fragment, 0)
        oldest = 1 if self._keep is None else max(1, newest - self._keep + 1)
        for version in range(oldest, newest + 1):
            commit = self.commits[fragment, version]
            for ref in (*_refs(commit), *([commit.whole] if commit.whole is not None else [])):
                yield ref, f"version {version} of {newest}"
        while 1 < oldest <= newest and self.commits[fragment, oldest].parameters is None:
            oldest -= 1
            for each in (self.commits[fragment, oldest].parameters, self.commits[fragment, oldest].update):
                if each is not None:
                    yield each, f"the way to the versions up to {newest}"
                    break
        for (of, version), records in self.records.items():
            if of == fragment and version > newest:
                for learner_id, record in records.items():
                    yield record.data, f"the record of {learner_id} in the open round {version}"
        for partial in self.partials.values():
            if partial.fragment == fragment and partial.version > newest:
                yield partial.data, f"the sums of {partial.by} in the open round {partial.version}"

    # --- what is created --------------------------------------------------------------------------------

    def _founded(self, manifest: Manifest) -> None:
        for fragment, ref in enumerate(manifest.initial):
            self._require_there(ref, "the run")
            self.values[fragment, 0] = tensors(self.objects, ref, manifest.layout[fragment])
        self.manifest = manifest

    def _claimed(self, where: Round, claim: Claim) -> None:
        self._claimed_at.setdefault(where, {})[claim.learner_id, claim.generation] = self._now_s()

    def _recorded(self, key: str, record: Contribution) -> None:
        fragment, version, learner_id = keys.parse_round(key)
        self.records.setdefault((fragment, version), {})[learner_id] = record
        self.recorded_at.setdefault((fragment, version), {})[learner_id] = self._now_s()
        self._recorded_at[record.data.key] = self._now_s()
        if record.generation < self._generations[learner_id] and self._store.get(record.data.key) is None:
            self.spoilt.add(record.data.key)  # who slept while another took its ID over: its data was swept as an older life's
        if version > self.newest.get(fragment, 0):
            self._require_there(record.data, f"the record {key}")

    def _summed(self, key: str, partial: Partial) -> None:
        """Sums ahead of a merge hold what they name, and it is what was offered."""
        where = (partial.fragment, partial.version)
        if key != keys.partial(*where, partial.group):
            raise Violation(Invariant.REPLAY, f"{key} holds sums of another group or round")
        if partial.version > self.newest.get(partial.fragment, 0):
            self._require_there(partial.data, key)
        for merged in partial.merged:
            self._check_offered(key, where, merged)
        self._replay(where).check_sums(key, partial)
        self.partials[partial.data.key] = partial

    def _is_a_dead_learners(self, key: str) -> bool:
        """Whether a contribution's learner could be taken for dead when it was in no open round: then it may be swept away.

        A sweep may have begun before the record was made, and have been suspended since.
        """
        recorded_long_ago = self._now_s() - self._recorded_at.get(key, self._now_s()) > _SWEEP_S
        dead = keys.is_delta(key) and not recorded_long_ago and self._was_silent(keys.data_owner(key), self._written_at[key])
        if dead:
            self.spoilt.add(key)
        return dead

    def _require_there(self, ref: DataRef, whose: str) -> None:
        if ref.key not in self.spoilt and self._store.get(ref.key) != self.objects.get(ref.key, b"never written"):
            raise Violation(Invariant.KEPT, f"{whose} names {ref.key}, which is not there")

    def _committed(self, key: str, commit: Commit) -> None:
        fragment, version, _ = keys.parse_round(key)
        where = (fragment, version)
        if where in self.commits:
            raise Violation(Invariant.ONE_COMMIT, f"{key} was created a second time")
        if version != self.newest.get(fragment, 0) + 1:
            raise Violation(Invariant.ONE_COMMIT, f"{key} follows version {self.newest.get(fragment, 0)}")
        for ref in _refs(commit):
            self._require_there(ref, key)
        self._check_parts(key, where, commit)
        self._check_complete(key, where, commit)
        replay, before = self._replay(where), self.values[fragment, version - 1]
        values = replay.value(key, commit, before)
        replay.check(key, commit, self.commits.get((fragment, version - 1)), before, values)
        self.commits[where], self.values[where], self.newest[fragment] = commit, values, version
        self.merged |= dict.fromkeys((merged.nonce for merged in commit.merged), where)
        self.left_out |= {left_out.nonce: left_out for left_out in commit.left_out}

    def _check_parts(self, key: str, where: Round, commit: Commit) -> None:
        for part in [[merged.nonce for merged in commit.merged], *([merged.nonce for merged in part] for part in in_sums(commit))]:
            if len(part) != len({*part}) or (part != sorted(part) and not commit.ahead):
                raise Violation(Invariant.REPLAY, f"{key} names its contributions out of order: {part}")
        for ahead, contributions in zip(commit.ahead, in_sums(commit), strict=False):
            partial = self.partials.get(ahead.data.key)
            if partial is None or (partial.fragment, partial.version) != where or [*partial.merged] != contributions:
                raise Violation(Invariant.REPLAY, f"{key} has {contributions} from the sums of {ahead.by}, which are {partial}")
        for merged in commit.merged:
            if merged.nonce in self.merged:
                raise Violation(
                    Invariant.MERGED_ONCE, f"{merged.nonce} of {merged.learner_id} is in {key} and in {self.merged[merged.nonce]}"
                )
            self._check_offered(key, where, merged)
        for left_out in commit.left_out:
            if self.records[where][left_out.learner_id].data.key not in self.spoilt:
                raise Violation(Invariant.COMPLETE, f"{key} leaves {left_out.learner_id} out without reason: {left_out.reason}")

    def _check_offered(self, key: str, where: Round, merged: Merged) -> None:
        record = self.records.get(where, {}).get(merged.learner_id)
        if record is None or _named(merged) != _named(record) or merged.weight != record.samples * (record.samples / record.steps):
            raise Violation(Invariant.REPLAY, f"{key} has {merged}, the round has {record}")

    def _check_complete(self, key: str, where: Round, commit: Commit) -> None:
        """Whoever merges lists the round after it has claimed it."""
        claimed_at = self._claimed_at.get(where, {}).get((commit.by, commit.generation), float("-inf"))
        there = {learner_id for learner_id, at_s in self.recorded_at.get(where, {}).items() if at_s < claimed_at}
        named = {merged.learner_id for merged in commit.merged} | {left_out.learner_id for left_out in commit.left_out}
        if not there <= named:
            raise Violation(Invariant.COMPLETE, f"{key} says nothing of {there - named}, who were in the round before it was claimed")

    # --- what a commit holds ----------------------------------------------------------------------------

    def _replay(self, where: Round) -> Replay:
        return Replay(
            algorithm=self._algorithm,
            specs=self.specs(where[0]),
            objects=self.objects,
            records=self.records.get(where, {}),
            partials=self.partials,
        )

    def specs(self, fragment: int) -> tuple[TensorSpec, ...]:
        assert self.manifest is not None
        return self.manifest.layout[fragment]

    def delta(self, fragment: int, nonce: str) -> list[Tensor]:
        """What a contribution that is in a commit has brought."""
        merged = next(each for each in self.commits[self.merged[nonce]].merged if each.nonce == nonce)
        return tensors(self.objects, merged.data, self.specs(fragment))

    def check_adopted(self, who: str, fragment: int, version: int, nonce: str, values: Sequence[Tensor]) -> None:
        if nonce != (self.commits[fragment, version].nonce if version else INITIAL_NONCE):
            raise Violation(Invariant.SAME_BITS, f"{who} took version {version} of fragment {fragment} for commit {nonce}")
        self.check_values(who, fragment, version, values)

    def check_values(self, who: str, fragment: int, version: int, values: Sequence[Tensor]) -> None:
        if not same_bits(values, self.values[fragment, version]):
            raise Violation(Invariant.SAME_BITS, f"{who} has {values} as version {version}, not {self.values[fragment, version]}")


def is_creation(event: Event) -> bool:
    """Whether a request has made an object, or replaced one."""
    return event.what == "put" or (event.what == "put_if_absent" and event.outcome.startswith("created"))


def _refs(commit: Commit) -> list[DataRef]:
    return [ref for ref in (commit.update, commit.parameters, commit.outer) if ref is not None]


def _named(part: Merged | Contribution) -> tuple[object, ...]:
    return (part.nonce, part.learner_id, part.generation, part.steps, part.samples, part.data, part.anchor)
