"""A run as its mailbox shows it at one moment: one frozen value, which every verb that looks at a run is fed with.

Reading needs no right to write and changes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gradientmail_torch import keys
from gradientmail_torch.cli.gather import gather, names_below, read_all
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import CorruptObject, InvalidName, RunMismatch, RunTimeout
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Beat, Commit, LifeRecord, Manifest, check_manifest, read
from gradientmail_torch.patterns.barrier import read_parties
from gradientmail_torch.patterns.queue import Progress, SharedQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeView:
    """One life of a learner."""

    learner_id: str
    generation: int
    record: LifeRecord | None
    """None when it cannot be read."""
    beat: Beat | None
    """The last one; None before the first, and for lives that a newer one has followed."""

    @property
    def samples_per_second(self) -> float:
        if self.beat is None or not self.beat.steps or not self.beat.seconds_per_step:
            return 0.0
        return self.beat.samples / self.beat.steps / self.beat.seconds_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentView:
    index: int
    tensors: int
    parameters: int
    """Numbers in it, buffers left out."""
    version: int
    commit: Commit | None
    """The newest; None at version 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRound:
    fragment: int
    version: int
    contributors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierView:
    name: str
    arrived: tuple[str, ...]
    missing: tuple[str, ...]
    """Learners of the run that have not arrived; none once as many are there as one of them waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    name: str
    progress: Progress | None
    """None while it has not been filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    mailbox: str
    manifest: Manifest
    learners: tuple[LifeView, ...]
    """The newest life of each learner ID, by ID."""
    earlier: tuple[LifeView, ...]
    """The lives before; empty unless the history was asked for."""
    fragments: tuple[FragmentView, ...]
    rounds: tuple[OpenRound, ...]
    """Rounds with a contribution and without a commit."""
    barriers: tuple[BarrierView, ...]
    queues: tuple[QueueView, ...]
    commits: tuple[Commit, ...] = ()
    """All that have been made, in the order of fragment and version; empty unless the history was asked for."""

    @property
    def parameters(self) -> int:
        return sum(fragment.parameters for fragment in self.fragments)


def read_run(mailbox: Mailbox, *, history: bool = False, clock: Clock = SYSTEM_CLOCK) -> RunView:
    """The run in ``mailbox``; ``history`` reads every commit as well, a request each.

    Raises :class:`RunMismatch` when there is none.
    """
    manifest = read(mailbox, Manifest, keys.RUN)
    if manifest is None:
        raise RunMismatch(f"{mailbox!r} holds no run: a Session founds one. Is the URL, with its prefix, that of the run?")
    check_manifest(manifest)
    learners, earlier = _lives(mailbox, history, clock)
    commits = _commits(mailbox, manifest, learners, history, clock)
    fragments = _fragments(manifest, commits)
    return RunView(
        mailbox=repr(mailbox),
        manifest=manifest,
        learners=learners,
        earlier=earlier,
        fragments=fragments,
        rounds=_open_rounds(mailbox, {fragment.index: fragment.version for fragment in fragments}),
        barriers=read_barriers(mailbox, [life.learner_id for life in learners], clock=clock),
        queues=read_queues(mailbox),
        commits=commits if history else (),
    )


def read_beats(mailbox: Mailbox, lives: Iterable[keys.Life], *, clock: Clock = SYSTEM_CLOCK) -> dict[keys.Life, Beat | None]:
    """The last beat of each life."""
    wanted = [*lives]
    return dict(zip(wanted, read_all(mailbox, Beat, [keys.beat(*life) for life in wanted], clock=clock), strict=True))


def _lives(mailbox: Mailbox, history: bool, clock: Clock) -> tuple[tuple[LifeView, ...], tuple[LifeView, ...]]:
    """The newest life of each learner, and, where the history is asked for, those before."""
    lives: list[keys.Life] = []
    for key in mailbox.list(keys.LEARNERS):
        with contextlib.suppress(InvalidName):  # not ours
            lives.append(keys.parse_life(key))
    newest = {learner_id: max(generation for who, generation in lives if who == learner_id) for learner_id, _ in lives}
    wanted = sorted(lives if history else (keys.Life(*each) for each in newest.items()))
    records = read_all(mailbox, LifeRecord, [keys.learner(*life) for life in wanted], clock=clock)
    beats = read_beats(mailbox, [life for life in wanted if newest[life.learner_id] == life.generation], clock=clock)
    views = [
        LifeView(learner_id=life.learner_id, generation=life.generation, record=record, beat=beats.get(life))
        for life, record in zip(wanted, records, strict=True)
    ]
    current = tuple(view for view in views if newest[view.learner_id] == view.generation)
    return current, tuple(view for view in views if newest[view.learner_id] != view.generation)


def _commits(mailbox: Mailbox, manifest: Manifest, learners: Iterable[LifeView], history: bool, clock: Clock) -> tuple[Commit, ...]:
    """All commits, or the newest of each fragment, looked for from the newest version that a beat names."""
    wanted: list[str] = []
    for fragment in range(len(manifest.layout)):
        hint = max((life.beat.versions[fragment] for life in learners if life.beat and len(life.beat.versions) > fragment), default=0)
        after = keys.commit(fragment, hint - 1) if hint > 1 and not history else ""
        listed = [key for key in mailbox.list(keys.commit_prefix(fragment), after=after) if _version(key)]
        wanted += listed if history else listed[-1:]
    return tuple(commit for commit in read_all(mailbox, Commit, wanted, clock=clock) if commit is not None)


def _fragments(manifest: Manifest, commits: Iterable[Commit]) -> tuple[FragmentView, ...]:
    newest = {commit.fragment: commit for commit in commits}  # they come in the order of their versions
    return tuple(
        FragmentView(
            index=index,
            tensors=len(specs),
            parameters=sum(spec.numel for spec in specs if spec.kind == "parameter"),
            version=newest[index].version if index in newest else 0,
            commit=newest.get(index),
        )
        for index, specs in enumerate(manifest.layout)
    )


def _version(key: str) -> int:
    try:
        return keys.parse_round(key).version
    except InvalidName:
        return 0


def _open_rounds(mailbox: Mailbox, versions: Mapping[int, int]) -> tuple[OpenRound, ...]:
    found: dict[tuple[int, int], list[str]] = {}
    for key in mailbox.list(keys.ROUNDS):
        with contextlib.suppress(InvalidName):
            fragment, version, learner_id = keys.parse_round(key)
            if learner_id and version > versions.get(fragment, version):
                found.setdefault((fragment, version), []).append(learner_id)
    return tuple(OpenRound(fragment=f, version=v, contributors=tuple(who)) for (f, v), who in sorted(found.items()))


def read_barriers(mailbox: Mailbox, learners: Sequence[str], *, clock: Clock = SYSTEM_CLOCK) -> tuple[BarrierView, ...]:
    """Every barrier, and which of ``learners`` it still waits for."""
    arrived: dict[str, dict[str, str]] = {}
    """By barrier and learner, the key of the arrival."""
    for key in mailbox.list(keys.BARRIERS):
        if (learner_id := keys.parse_arrival(key)) is not None:
            arrived.setdefault(keys.segment_below(keys.BARRIERS, key), {})[learner_id] = key
    missing = {name: tuple(each for each in learners if each not in who) for name, who in arrived.items()}
    looked_at = [name for name in arrived if missing[name]]
    first = [next(iter(arrived[name].values())) for name in looked_at]
    parties = dict(zip(looked_at, gather((partial(read_parties, mailbox, key) for key in first), clock=clock), strict=True))
    opened = {name for name in looked_at if len(arrived[name]) >= (parties[name] or math.inf)}
    return tuple(
        BarrierView(name=name, arrived=tuple(who), missing=() if name in opened else missing[name]) for name, who in arrived.items()
    )


def read_queues(mailbox: Mailbox) -> tuple[QueueView, ...]:
    return tuple(_queue(mailbox, name) for name in names_below(mailbox, keys.QUEUES))


def _queue(mailbox: Mailbox, name: str) -> QueueView:
    try:
        progress = SharedQueue(name, mailbox, "reader", fill_timeout=0).progress()
    except (RunTimeout, CorruptObject):
        progress = None
    return QueueView(name=name, progress=progress)
