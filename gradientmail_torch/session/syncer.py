"""Watches open rounds, and has those merged whose turn is this learner's. Every learner can be the syncer.

In a large run a learner looks only at what may concern it: which rounds call it, and who is in those that it may be
about to merge, or to sum up its group of. What it pays so does not grow with the number of learners.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from gradientmail_torch import keys
from gradientmail_torch.algorithms.algorithm import Algorithm, Pace
from gradientmail_torch.algorithms.quorum import RoundView, closes, quorum_reached, waited_for
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import InvalidName
from gradientmail_torch.session.crowd import crowd
from gradientmail_torch.session.delegate import GRACE_SHARE, LOOKING, Delegate
from gradientmail_torch.session.membership import Membership
from gradientmail_torch.session.merger import Merger
from gradientmail_torch.session.observer import Peer
from gradientmail_torch.session.partials import awaited
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.round_listing import contributions, is_large, opened_rounds
from gradientmail_torch.session.run import Run
from gradientmail_torch.session.settings import Settings
from gradientmail_torch.session.turns import Turn, Turns

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Watch:
    """What this learner has seen of one open round, by its own clock."""

    turn: Turn
    quorum_at: float | None = None
    warned_at: float | None = None
    void: frozenset[str] = frozenset()
    """Contributors whose record turned out to be none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Whom the syncer tells what it has seen."""

    called: Callable[[], None]
    """Another learner's contribution is in an open round."""
    hinted: Callable[[], None]
    """A newer commit exists."""
    lost: Callable[[], None]
    """The record of this learner's contribution is gone from the open round."""


class Syncer:
    def __init__(
        self,
        run: Run,
        replica: Replica,
        algorithm: Algorithm,
        delegate: Delegate,
        merger: Merger,
        life: keys.Life,
        *,
        settings: Settings,
        clock: Clock,
        membership: Membership,
        pace: Callable[[], Pace],
        signals: Signals,
    ) -> None:
        self._run = run
        self._replica = replica
        self._algorithm = algorithm
        self._delegate = delegate
        self._merger = merger
        self._life = life
        self._settings = settings
        self._clock = clock
        self._membership = membership
        self._pace = pace
        self._signals = signals
        self._turns = Turns(run, life, settings=settings, clock=clock)
        self._watches: dict[tuple[int, int], _Watch] = {}
        self._quiet_ticks = 0
        self._last_listing: list[str] = []
        self._look_from = 0
        """The fragment at which the next look for opened rounds begins, in a large run."""
        self.open_rounds: dict[tuple[int, int], frozenset[str]] = {}
        """Contributors of the open rounds as last listed, by fragment and version; not all of them in a large run."""

    def tick(self) -> float:
        recorded = self._own_records()
        near = self._near(recorded) if self._is_large() else None
        listing = self._list_all() if near is None else self._list_some(near, recorded)
        rounds = self._note(listing)
        for (index, version), contributors in rounds.items():
            fragment = self._replica.fragments[index]
            if version > fragment.known + 1:
                self._replica.call(fragment, version)  # its predecessor is committed: a hint
                self._signals.hinted()
            elif version == fragment.known + 1:
                if contributors - {self._life.learner_id} and self._replica.call(fragment, version):
                    self._signals.called()
                watch = self._watch(index, version)
                if near is None or (index, version) in near:
                    self._consider(fragment, version, contributors, watch)
        for fragment, version in recorded:
            if version == fragment.known + 1 and self._life.learner_id not in rounds.get((fragment.index, version), ()):
                self._miss_own_record(fragment, version)
        self._watches = {key: watch for key, watch in self._watches.items() if key in rounds}
        return self._pause(listing)

    def _watch(self, index: int, version: int) -> _Watch:
        return self._watches.setdefault((index, version), _Watch(Turn(self._clock.monotonic())))

    def _own_records(self) -> list[tuple[Fragment, int]]:
        """The open rounds in which this learner has recorded a contribution."""
        pending = [(fragment, fragment.pending) for fragment in self._replica.fragments]
        return [(f, each.version) for f, each in pending if each is not None and each.recorded and each.version == f.known + 1]

    def _miss_own_record(self, fragment: Fragment, version: int) -> None:
        """It was swept away with a commit, or somebody has deleted it: then it is made again."""
        if self._run.commit(fragment.index, version) is not None:
            self._signals.hinted()
            return
        log.warning("fragment %d, version %d: this learner's record is gone from the round and is made again", fragment.index, version)
        with self._replica.lock:
            if fragment.pending is not None and fragment.pending.version == version:
                fragment.pending.recorded = False
        self._signals.lost()

    def _is_large(self) -> bool:
        """Whether there is too much to list for any but those who are leaving: they have to see all rounds."""
        return self._membership.state != "leaving" and is_large(len(self._membership.peers), len(self._replica.fragments))

    def _list_all(self) -> list[str]:
        """One listing of all fragments, or of each where that would turn up every record that was ever made."""
        fragments = self._replica.fragments
        if len(fragments) > 1 and self._settings.keep is not None:
            return list(self._run.mailbox.list(keys.ROUNDS))
        listing: list[str] = []
        for fragment in fragments:
            prefix = keys.round_prefix(fragment.index)
            listing.extend(self._run.mailbox.list(prefix, after=keys.round_prefix(fragment.index, fragment.known + 1)))
        return listing

    def _near(self, recorded: Collection[tuple[Fragment, int]]) -> list[tuple[int, int]]:
        """The rounds that this learner may be about to merge, or to sum up its group of."""
        now, live = self._clock.monotonic(), self._live_peers()
        near = set()
        for fragment, version in recorded:
            place = self._delegate.place(fragment, version, self._membership.peers)
            seen_s = now - self._watch(fragment.index, version).turn.seen_at
            if place is not None and seen_s >= place // LOOKING * self._settings.lease:
                near.add((fragment.index, version))
        near |= {place for place, watch in self._watches.items() if self._turns.may_have_come(*place, watch.turn, live)}
        return sorted(near)

    def _list_some(self, near: Collection[tuple[int, int]], recorded: Collection[tuple[Fragment, int]]) -> list[str]:
        """Who is in the rounds that are ``near``, and which rounds call this learner; elsewhere it takes itself to be in."""
        uncalled = {f.index: f.known for f in self._replica.fragments if f.pending is None and not f.called}
        listing, self._look_from = opened_rounds(self._run.mailbox, uncalled, self._look_from)
        for place in near:
            listing += contributions(self._run.mailbox, *place)
        elsewhere = {*self._watches, *((fragment.index, version) for fragment, version in recorded)}.difference(near)
        return listing + [keys.contribution(*place, self._life.learner_id) for place in sorted(elsewhere)]

    def _note(self, listing: list[str]) -> dict[tuple[int, int], frozenset[str]]:
        """The rounds in a listing that are open as far as this learner knows."""
        known = [fragment.known for fragment in self._replica.fragments]
        found: dict[tuple[int, int], set[str]] = {}
        for key in listing:
            try:
                index, version, learner_id = keys.parse_contribution(key)
            except InvalidName:
                continue  # not ours
            if index < len(known) and version > known[index]:
                found.setdefault((index, version), set()).add(learner_id)
        # A name ahead of its turn proves nothing: it may be a stranger's.
        ahead = {index for index, version in found if version > known[index] + 1}
        behind = {index for index in ahead if self._run.commit(index, known[index] + 1) is not None}
        self.open_rounds = {
            (index, version): frozenset(contributors)
            for (index, version), contributors in found.items()
            if version == known[index] + 1 or index in behind
        }
        return self.open_rounds

    def _pause(self, listing: list[str]) -> float:
        """Look less often, down to a quarter, while the listing shows nothing new and no round is open."""
        self._quiet_ticks = 0 if listing != self._last_listing or self.open_rounds else self._quiet_ticks + 1
        self._last_listing = listing
        return self._pace().poll_interval * min(4, 1 + self._quiet_ticks // 4)

    # --- deciding --------------------------------------------------------------------------------------

    def _consider(self, fragment: Fragment, version: int, contributors: frozenset[str], watch: _Watch) -> None:
        now, live = self._clock.monotonic(), self._live_peers()
        training = frozenset(i for i, peer in live.items() if peer.beat.state == "training")
        listed = contributors
        if not training <= contributors:  # once all are in it, nobody is left to come
            contributors -= watch.void
        view = RoundView(
            contributors=contributors,
            training=training & fragment.recent if self._membership.sampled and fragment.recent else training,
            staying=frozenset(i for i, peer in live.items() if peer.beat.state != "leaving") | self._itself(),
        )
        waited_s, grace_s = self._since_quorum_s(view, watch, now), self._grace_s()
        late = waited_s is not None and waited_s >= GRACE_SHARE * grace_s
        if self._delegate.consider(fragment, version, listed, self._membership.peers, waited_enough=late):
            return
        if waited_s is None:
            self._warn_short(fragment, version, view, watch, now)
            return
        if not closes(view, since_quorum_s=waited_s, grace_s=grace_s):
            return
        turn = watch.turn
        if self._turns.has_come(fragment.index, version, turn, live, now) and self._turns.claim(fragment.index, version, turn):
            expected = crowd(fragment.recent, self._membership.peers, self._life.learner_id, self._algorithm.fan_in)
            if not expected.groups or self._summed_ahead(fragment, version, contributors, expected.groups, now - turn.claim_at):
                watch.void |= self._merger.merge(fragment, version, watch.void, expected)

    def _live_peers(self) -> dict[str, Peer]:
        return {learner_id: peer for learner_id, peer in self._membership.peers.items() if peer.live}

    def _since_quorum_s(self, view: RoundView, watch: _Watch, now: float) -> float | None:
        """For how long the round has had its quorum; None below it."""
        if not quorum_reached(view, self._algorithm.quorum):
            watch.quorum_at = None
            return None
        watch.quorum_at = now if watch.quorum_at is None else watch.quorum_at
        return now - watch.quorum_at

    def _summed_ahead(self, fragment: Fragment, version: int, contributors: frozenset[str], groups: int, waited_s: float) -> bool:
        """Whether the groups have been summed, as far as those who are to do it are alive, or have had their time."""
        if waited_s >= self._settings.merge_timeout / 2:
            return True
        return not awaited(self._run, fragment.index, version, contributors, groups, self._membership.peers)

    def _itself(self) -> frozenset[str]:
        """This learner, unless it is leaving: it knows better than its own beat, which it may not have seen yet."""
        return frozenset() if self._membership.state in ("leaving", "ended") else frozenset({self._life.learner_id})

    def _grace_s(self) -> float:
        return self._algorithm.grace_s(replace(self._pace(), merge_seconds=self._merger.seconds))

    def _warn_short(self, fragment: Fragment, version: int, view: RoundView, watch: _Watch, now: float) -> None:
        watch.warned_at = now if watch.warned_at is None else watch.warned_at
        if now - watch.warned_at >= self._settings.quorum_warning:
            watch.warned_at = now
            log.warning(
                "fragment %d, version %d: %d of %d contributions (%s); waiting for %s",
                fragment.index, version, len(view.contributors), self._algorithm.quorum,
                ", ".join(sorted(view.contributors)), ", ".join(waited_for(view)) or "learners to come",
            )  # fmt: skip
