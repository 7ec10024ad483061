"""Deliberate bugs in the real code, and the seeds of simulated training that catch each: a check of the checks.

``python tests/testing/planted_bugs.py [--seeds N] [NAME …]`` searches for catching seeds anew.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from gradientmail_torch import keys
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.adoption import Keep, Outcome
from gradientmail_torch.mailbox.watched_time import WatchedTime
from gradientmail_torch.mailbox.wrappers import CountingMailbox, RetryingMailbox
from gradientmail_torch.messages import Contribution
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.session import closing_round, lease, partials, publisher, replica, syncer, turns
from gradientmail_torch.session.aligner import Aligner
from gradientmail_torch.session.closing_round import ClosingRound
from gradientmail_torch.session.lease import Heartbeat
from gradientmail_torch.session.leaving import Leaving
from gradientmail_torch.session.membership import Membership
from gradientmail_torch.session.merger import Merger
from gradientmail_torch.session.observer import Observer
from gradientmail_torch.session.publisher import Publisher
from gradientmail_torch.session.replica import Pending, Replica
from gradientmail_torch.session.retention import Retention
from gradientmail_torch.session.run import Run
from gradientmail_torch.session.session import Session
from gradientmail_torch.session.syncer import Syncer
from gradientmail_torch.session.turns import Turns
from gradientmail_torch.session.whole_writer import WholeWriter
from gradientmail_torch.testing.training import Invariant, Violation, simulate

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    name: str
    what: str
    plant: Callable[[Patch], None]


BUGS: dict[str, Bug] = {}


def bug(what: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = Bug(name=plant.__name__, what=what, plant=plant)
        return plant

    return add


def caught(planted: Bug, seed: int) -> Invariant | str | None:
    """What catches the bug at this seed: an invariant, another error by its name, or nothing."""
    with pytest.MonkeyPatch.context() as patch:
        planted.plant(patch)
        try:
            simulate(seed)
        except Violation as violation:
            return violation.invariant
        except Exception as error:
            return type(error).__name__
    return None


# --- the rules that are marked in the design of the protocol ----------------------------------------------


@bug("whose commit is refused deletes its data, without looking whether the commit there is its own")
def deletes_before_reading(patch: Patch) -> None:
    publish, is_ours = Merger._publish, RetryingMailbox._is_ours

    def careless(self: Any, *arguments: Any) -> None:
        read = self._run.commit
        self._run.commit = lambda *of: msgspec.structs.replace(read(*of), nonce="0" * 32)
        try:
            publish(self, *arguments)
        finally:
            del self._run.commit

    patch.setattr(Merger, "_publish", careless)
    # An honest mailbox never refuses what is one's own: the rule is there for those that do.
    patch.setattr(RetryingMailbox, "_is_ours", lambda self, key, data: not key.startswith("commits/") and is_ours(self, key, data))


@bug("a life is put down without looking whether another has been")
def lives_overwrite(patch: Patch) -> None:
    put_instead(patch, "learners/")


@bug("old commits are deleted")
def deletes_commits(patch: Patch) -> None:
    original = Retention.sweep

    def sweep(self: Any, fragment: int, newest: int) -> int:
        for key in list(self._run.mailbox.list(keys.commit_prefix(fragment))):
            if keys.parse_round(key).version <= newest - self._keep:
                self._run.mailbox.delete(key)
        return original(self, fragment, newest)

    patch.setattr(Retention, "sweep", sweep)


@bug("a process does not stop when a newer one has its ID")
def never_fenced(patch: Patch) -> None:
    patch.setattr(Heartbeat, "check_not_fenced", lambda self: None)


@bug("at a step boundary it contributes first, then adopts")
def contributes_first(patch: Patch) -> None:
    original = Session._exchange

    def exchange(self: Any, replica: Any) -> None:
        for fragment in replica.fragments:
            if replica.due(fragment):
                replica.contribute(fragment, uuid4().hex)
                self._engine.wake("publisher")
        original(self, replica)

    patch.setattr(Session, "_exchange", exchange)


@bug("the upload chooses the round: a late contribution is never recorded again")
def never_records_again(patch: Patch) -> None:
    original = Publisher._advance
    patch.setattr(Publisher, "_advance", lambda self, fragment, pending: None if pending.recorded else original(self, fragment, pending))


@bug("whether a commit holds its contribution is decided by the learner ID")
def decides_by_learner_id(patch: Patch) -> None:
    def note_outcome(pending: Any, commit: Any) -> None:
        mine = pending.record.learner_id if pending.record else ""
        if any(merged.learner_id == mine for merged in commit.merged):
            pending.outcome = Outcome.MERGED

    patch.setattr(replica, "note_outcome", note_outcome)


@bug("a round that is skipped is not read, though it may hold its contribution")
def skips_rounds_unread(patch: Patch) -> None:
    original = Replica.stage

    def stage(self: Any, fragment: Any, commit: Any, values: Any, also_read: Any = ()) -> bool:
        if original(self, fragment, commit, values, also_read):
            return True
        nothing = msgspec.structs.replace(commit, version=fragment.pending.version, merged=(), left_out=())
        return original(self, fragment, commit, values, [nothing])

    patch.setattr(Replica, "stage", stage)


@bug("what was left out for being unsound is kept")
def keeps_the_rejected(patch: Patch) -> None:
    original = replica.what_to_keep
    patch.setattr(replica, "what_to_keep", lambda outcome: Keep.ALL if outcome is Outcome.REJECTED else original(outcome))


@bug("who is more than two versions behind loses its progress without a word")
def too_old_is_lost(patch: Patch) -> None:
    original = Replica._apply

    def apply(self: Any, fragment: Any, staged: Any, outcome: Any) -> Any:
        if staged.version - fragment.version > 2:
            return self._access.write(fragment.index, staged.values)
        return original(self, fragment, staged, outcome)

    patch.setattr(Replica, "_apply", apply)


@bug("a close waits for the commit of what is on its way, and forgets what has been done since")
def closes_after_one_commit(patch: Patch) -> None:
    patch.setattr(Leaving, "_contribute_rest", lambda self: None)
    patch.setattr(Leaving, "_left", lambda self, *, on_its_way_only: "x" if any(f.pending for f in self._replica.fragments) else "")


@bug("an observer takes its own silence for everyone's death")
def own_silence_is_death(patch: Patch) -> None:
    original = WatchedTime.__init__

    def init(self: Any, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **settings)
        self._longest_gap_s = math.inf

    patch.setattr(WatchedTime, "__init__", init)


@bug("only the first in the order may claim a round")
def only_the_first_claims(patch: Patch) -> None:
    original = turns.merge_order

    def merge_order(run: str, fragment: int, version: int, uplinks: Any) -> list[str]:
        first, *others = original(run, fragment, version, uplinks)
        return [first, *["nobody"] * 10**6, *others]

    patch.setattr(turns, "merge_order", merge_order)


@bug("a claim holds for ever")
def claims_never_end(patch: Patch) -> None:
    patch.setattr(Turns, "_is_stale", lambda *_: False)


@bug("a claim holds as long as its owner lives")
def no_merge_timeout(patch: Patch) -> None:
    def is_stale(self: Any, claim: Any, claimed_at: float, live: Any, now: float) -> bool:
        owner = live.get(claim.learner_id)
        return owner is None or owner.generation != claim.generation

    patch.setattr(Turns, "_is_stale", is_stale)


@bug("commits are put, not created")
def commits_overwrite(patch: Patch) -> None:
    put_instead(patch, "commits/")


@bug("norms are clipped as they are, not per step")
def clips_plain_norms(patch: Patch) -> None:
    original = closing_round.clip_factors
    patch.setattr(closing_round, "clip_factors", lambda norms, steps: original(norms, [1] * len(steps)))


@bug("a round of which all are left out is not committed")
def no_empty_commit(patch: Patch) -> None:
    original = Merger._publish

    def publish(self: Any, fragment: Any, version: int, closing: Any, *rest: Any) -> None:
        if closing.merged:
            original(self, fragment, version, closing, *rest)

    patch.setattr(Merger, "_publish", publish)


# --- others --------------------------------------------------------------------------------------------------


@bug("after a lost answer what is found there is taken for another's, without reading it")
def no_read_back(patch: Patch) -> None:
    patch.setattr(RetryingMailbox, "_is_ours", lambda self, key, data: False)


@bug("one contribution is summed twice")
def merges_twice(patch: Patch) -> None:
    original = ClosingRound.contributions

    def contributions(self: Any) -> Iterator[Any]:
        found = list(original(self))
        yield from (*found[:1], *found)

    patch.setattr(ClosingRound, "contributions", contributions)


@bug("adopting drops the local progress")
def drops_carried_progress(patch: Patch) -> None:
    patch.setattr(Replica, "_apply", lambda self, fragment, staged, outcome: self._access.write(fragment.index, staged.values))


@bug("adopting keeps the progress that the commit holds")
def keeps_what_is_merged(patch: Patch) -> None:
    original = Pending.delta

    def delta(self: Any, specs: Any) -> Any:
        found = original(self, specs)
        return [each * 0 for each in found] if self.outcome is Outcome.MERGED else found

    patch.setattr(Pending, "delta", delta)


@bug("a commit is written without its outer state")
def no_outer_state(patch: Patch) -> None:
    original = Merger._publish
    patch.setattr(Merger, "_publish", lambda self, *arguments: original(self, *arguments[:-1], None))


@bug("the outer state of the version before is not read")
def forgets_outer_state(patch: Patch) -> None:
    patch.setattr(Merger, "_outer_state", lambda *_: None)


@bug("a round closes as soon as it has its quorum")
def no_grace(patch: Patch) -> None:
    patch.setattr(syncer, "closes", lambda *_, **__: True)


@bug("who is alive is told by comparing clocks")
def compares_clocks(patch: Patch) -> None:
    original = Observer.__init__

    def init(self: Any, mailbox: Any, *, lease: float, clock: Any) -> None:
        original(self, mailbox, lease=lease, clock=clock)
        self._clock = clock

    patch.setattr(Observer, "__init__", init)
    patch.setattr(Observer, "_lives", lambda self, sighting: abs(self._clock.wall() - sighting.beat.at) < self._lease)


@bug("what is not finite is offered and kept")
def keeps_nan(patch: Patch) -> None:
    patch.setattr(publisher, "_first_unsound", lambda *_: "")


@bug("the record is made before its data is there")
def record_before_data(patch: Patch) -> None:
    put, put_if_absent = CountingMailbox.put, CountingMailbox.put_if_absent

    def later(self: Any, key: str, body: Any) -> None:
        if key.endswith(".delta"):
            self.delayed = (key, body)
        else:
            put(self, key, body)

    def first(self: Any, key: str, body: Any) -> bool:
        made = put_if_absent(self, key, body)
        if key.startswith(keys.ROUNDS) and (delayed := getattr(self, "delayed", None)):
            self.delayed = None
            put(self, *delayed)
        return made

    patch.setattr(CountingMailbox, "put", later)
    patch.setattr(CountingMailbox, "put_if_absent", first)


@bug("a sweep takes what a live learner is about to record")
def sweeps_what_is_under_way(patch: Patch) -> None:
    patch.setattr(Membership, "live", lambda self: frozenset())


@bug("a sweep takes two versions too many")
def keeps_too_few(patch: Patch) -> None:
    original = Retention.sweep
    patch.setattr(Retention, "sweep", lambda self, fragment, newest: original(self, fragment, newest + 2))


@bug("the whole value that is written is the one before the commit")
def whole_of_the_version_before(patch: Patch) -> None:
    original = WholeWriter.offer
    patch.setattr(WholeWriter, "offer", lambda self, fragment, commit, values: original(self, fragment, commit, fragment.values))


@bug("a whole value that is not there yet is waited for, instead of the updates being read")
def wholes_are_taken_for_granted(patch: Patch) -> None:
    original = Run._ways

    def ways(self: Any, commit: Any, base: Any) -> Iterator[Any]:
        first = next(original(self, commit, base))
        yield first._replace(sure=True)

    patch.setattr(Run, "_ways", ways)


@bug("a whole value is read without looking at its digest")
def wholes_are_not_checked(patch: Patch) -> None:
    original = Run.tensors

    def tensors(self: Any, ref: Any, specs: Any) -> Any:
        data = self.mailbox.get(ref.key) if keys.is_whole(ref.key) else None
        return original(self, ref, specs) if data is None else wire.decode(data, specs, ref.wire, key=ref.key)

    patch.setattr(Run, "tensors", tensors)


@bug("a commit's promise of a whole value lets the one before it be swept away")
def promises_supersede(patch: Patch) -> None:
    original = Retention.__init__

    def init(self: Any, *arguments: Any, last_whole: Any, **settings: Any) -> None:
        original(self, *arguments, last_whole=lambda version: version, **settings)

    patch.setattr(Retention, "__init__", init)


@bug("what is in a sum made ahead is merged once more by itself")
def counts_the_summed_again(patch: Patch) -> None:
    original = ClosingRound._sum_partials

    def sum_partials(self: Any, *arguments: Any) -> Any:
        ahead = original(self, *arguments)
        self.merged = {}
        return ahead

    patch.setattr(ClosingRound, "_sum_partials", sum_partials)


@bug("where there are sums made ahead, what is in none of them is forgotten")
def merges_sums_alone(patch: Patch) -> None:
    original = ClosingRound._read_records
    patch.setattr(ClosingRound, "_read_records", lambda self, listed: {} if self.partials else original(self, listed))


@bug("sums made ahead are merged without looking at their digest")
def sums_are_not_checked(patch: Patch) -> None:
    def load_sums(run: Any, partial: Any, *_: Any) -> Any:
        specs, data = run.layout[partial.fragment], run.mailbox.get(partial.data.key)
        return None if data is None else partials._as_sums(partial, wire.decode(data, specs, "fp32", key=partial.data.key))

    patch.setattr(closing_round, "load_sums", load_sums)


@bug("a syncer waits for the sum of every group, whoever lives and however long that takes")
def waits_for_every_sum(patch: Patch) -> None:
    original = Syncer._summed_ahead

    def summed_ahead(self: Any, *arguments: Any) -> bool:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(partials, "delegate_of", lambda *_: "whoever")
            return original(self, *arguments[:-1], 0.0)

    patch.setattr(Syncer, "_summed_ahead", summed_ahead)


@bug("in a large run a round is taken for claimed without asking, also by who leaves")
def takes_rounds_for_claimed(patch: Patch) -> None:
    patch.setattr(Turns, "_seems_claimed", lambda *_: True)
    patch.setattr(Syncer, "_is_large", lambda self: syncer.is_large(len(self._membership.peers), len(self._replica.fragments)))


@bug("sums made ahead are put, not created")
def sums_overwrite(patch: Patch) -> None:
    put_instead(patch, "partials/")


@bug("what a sparse contribution leaves out is in nobody's books")
def holds_nothing_back(patch: Patch) -> None:
    patch.setattr(Replica, "_held_back", lambda self, work: replica.Work())


@bug("who leaves goes on leaving out what is small")
def leaves_sparsely(patch: Patch) -> None:
    patch.setattr(Replica, "hold_nothing_back", lambda self: None)


@bug("what the wire format has lost of a contribution counts as merged")
def credits_what_was_lost(patch: Patch) -> None:
    exact: dict[bytes, Any] = {}

    def encode(tensors: Any, specs: Any, form: str) -> bytes:
        data = wire.encode(tensors, specs, form)
        exact[data] = tensors
        return data

    patch.setattr(publisher, "wire", SimpleNamespace(encode=encode))
    patch.setattr(Pending, "delta", lambda self, specs: exact[self.sent])


@bug("contributions weigh by their samples alone")
def weighs_by_samples(patch: Patch) -> None:
    patch.setattr(Contribution, "weight", property(lambda self: float(self.samples)))


@bug("an ID is taken over without watching its silence")
def takes_over_at_once(patch: Patch) -> None:
    patch.setattr(lease, "_wait_until_silent", lambda *_: None)


@bug("a commit is taken for the version that follows the one it has")
def adopts_under_another_version(patch: Patch) -> None:
    original = Aligner._stage

    def stage(self: Any, fragment: Any, commit: Any, values: Any) -> None:
        original(self, fragment, msgspec.structs.replace(commit, version=fragment.known + 1), values)

    patch.setattr(Aligner, "_stage", stage)


@bug("a barrier opens one arrival too early")
def barrier_opens_early(patch: Patch) -> None:
    original = Barrier._wait
    patch.setattr(Barrier, "_wait", lambda self, name, parties, timeout: original(self, name, parties - 1, timeout))


def put_instead(patch: Patch, prefix: str) -> None:
    """Objects under ``prefix`` are written with an ordinary put."""
    original = CountingMailbox.put_if_absent

    def put_if_absent(self: Any, key: str, body: Any) -> bool:
        if not key.startswith(prefix):
            return original(self, key, body)
        self.inner.put(key, body)
        return True

    patch.setattr(CountingMailbox, "put_if_absent", put_if_absent)


# --- the search ------------------------------------------------------------------------------------------------


def search(planted: Bug, seeds: range, enough: int = 2) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for seed in seeds:
        by = caught(planted, seed)
        if by is not None:
            found.append((seed, by.name if isinstance(by, Invariant) else by))
        if len(found) == enough:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*BUGS], metavar="NAME")
    parser.add_argument("--seeds", type=int, default=300)
    chosen = parser.parse_args()
    for name in chosen.names:
        print(f"{name}: {search(BUGS[name], range(chosen.seeds)) or 'NOT CAUGHT'}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
