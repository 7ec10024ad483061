"""A run as its mailbox holds it: the manifest, the commits and the tensors they name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple
from uuid import uuid4

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.algorithm import Algorithm
from gradientmail_torch.algorithms.layout import Layout, check_same
from gradientmail_torch.errors import ConfigError, CorruptObject, InvalidName, RunMismatch
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import (
    PROTOCOL,
    Commit,
    DataRef,
    Manifest,
    TensorSpec,
    check_manifest,
    encode,
    read,
    read_data,
    reference,
)
from gradientmail_torch.session.parameters import total

log = logging.getLogger(__name__)

INITIAL_NONCE = "init"
"""Stands for the nonce of version 0, which has no commit."""


class Founding(NamedTuple):
    """What a learner would found a run with, and what it holds the run that is there against."""

    layout: Layout
    algorithm: Algorithm
    learner_id: str
    now: float
    """By the learner's own clock, for people to read."""
    values: Callable[[int], Sequence[Tensor]]
    """Gives a fragment's initial value."""
    frozen: str = ""
    """Digest of the parameters that do not travel; empty where it is not known."""


class Base(NamedTuple):
    """Values of a fragment that are in memory already."""

    version: int
    nonce: str
    """Of the commit that made them."""
    values: list[Tensor]


class _Way(NamedTuple):
    """What a commit's values can be made of."""

    start: list[Tensor] | None
    """Values at hand; None where the first object is whole."""
    refs: list[DataRef]
    """What is to be read, and added in turn."""
    sure: bool
    """Whether all of it was there before the commit."""


class Run:
    """Reads and writes what a run consists of. Holds no state but the manifest."""

    def __init__(self, mailbox: Mailbox, manifest: Manifest) -> None:
        self.mailbox = mailbox
        self.manifest = manifest

    @property
    def layout(self) -> Layout:
        return self.manifest.layout

    @classmethod
    def open(cls, mailbox: Mailbox) -> Run | None:
        """The run in ``mailbox``; None when none has been founded."""
        manifest = read(mailbox, Manifest, keys.RUN)
        if manifest is None:
            return None
        check_manifest(manifest)
        return cls(mailbox, manifest)

    @classmethod
    def join(cls, mailbox: Mailbox, founding: Founding) -> Run:
        """The run in ``mailbox``, founded when there is none yet.

        Several may found it at the same moment: all write their initial fragments first, one creates the
        manifest, and the others delete theirs. Raises :class:`RunMismatch` for another layout or algorithm, and
        :class:`ConfigError` where a parameter to found it with is not finite.
        """
        run = cls.open(mailbox) or cls._found(mailbox, founding)
        check_same(founding.layout, run.layout)
        if founding.frozen and run.manifest.frozen not in ("", founding.frozen):
            log.warning(
                "the frozen parameters of this model are not those that the run's founder had, so what the run trains means something else "
                "here: start from the same pretrained weights, and seed what is random alike. (A quantized copy, or a teacher that moves, "
                "may well differ)"
            )
        theirs = run.manifest.algorithm
        for name, value in founding.algorithm.shared().items():
            if theirs.get(name) != value:
                raise RunMismatch(
                    f"algorithm setting {name!r} is {value!r} here and {theirs.get(name)!r} in the run: all learners must share it"
                )
        return run

    @classmethod
    def _found(cls, mailbox: Mailbox, founding: Founding) -> Run:
        if next(_commits(mailbox, keys.COMMITS), None) is not None:
            if run := cls.open(mailbox):  # founded, and gone on with, since we looked
                return run
            raise CorruptObject(f"{mailbox!r} holds commits and no {keys.RUN!r}, so it was deleted: restore it, or use a new prefix")
        nonce = uuid4().hex
        initial = []
        for fragment, specs in enumerate(founding.layout):
            values = founding.values(fragment)
            _check_finite(values, specs)
            data = wire.encode(values, specs, "fp32")
            initial.append(reference(keys.initial(nonce, fragment), data, wire="fp32"))
            mailbox.put(initial[-1].key, data)
        manifest = Manifest(
            protocol=PROTOCOL,
            nonce=nonce,
            founder=founding.learner_id,
            founded_at=founding.now,
            layout=founding.layout,
            initial=tuple(initial),
            algorithm=founding.algorithm.shared(),
            frozen=founding.frozen,
        )
        created = mailbox.put_if_absent(keys.RUN, encode(manifest))
        winner = cls.open(mailbox)
        if winner is None:
            raise CorruptObject(f"{keys.RUN!r} in {mailbox!r} vanished while the run was being founded: who deletes objects there?")
        if winner.manifest.nonce != nonce:
            for ref in initial:
                mailbox.delete(ref.key)
        elif created:
            log.info("founded the run in %r: %d fragments", mailbox, len(founding.layout))
        return winner

    def commit(self, fragment: int, version: int) -> Commit | None:
        """The commit of a version; None where there is none yet. Raises :class:`CorruptObject` where something else is."""
        key = keys.commit(fragment, version)
        try:
            commit = read(self.mailbox, Commit, key)
        except CorruptObject as error:
            raise CorruptObject(f"{error}. It takes the place of a commit: if no learner of this run has made it, delete it") from error
        if commit is not None and (commit.fragment, commit.version) != (fragment, version):
            raise CorruptObject(f"{key!r} says that it is fragment {commit.fragment}, version {commit.version}: it was copied there")
        return commit

    def committed(self, fragment: int, version: int) -> Commit:
        """The commit of a version that has been committed."""
        commit = self.commit(fragment, version)
        if commit is None:
            raise CorruptObject(f"{keys.commit(fragment, version)!r} in {self.mailbox!r} is gone: commits must never be deleted")
        return commit

    def newest_version(self, fragment: int, *, from_version: int = 0) -> int:
        """The newest committed version of a fragment, looked for behind ``from_version``; 0 when there is none."""
        return max(self._versions(fragment, from_version), default=from_version)

    def _versions(self, fragment: int, from_version: int) -> Iterator[int]:
        """The committed versions behind ``from_version``, in order."""
        after = keys.commit(fragment, from_version) if from_version else ""
        return _commits(self.mailbox, keys.commit_prefix(fragment), after)

    def newest(self, fragment: int, *, from_version: int = 0, base: Base | None = None) -> tuple[Commit | None, list[Tensor]]:
        """The newest commit of a fragment, None at version 0, and its fp32 values; ``base`` may spare downloads."""
        while True:
            commit = self._newest_commit(fragment, from_version)
            if commit is None and from_version:
                from_version = 0  # what was said of the newest version was wrong
                continue
            if commit is None:
                return None, self.initial(fragment)
            values = self.values(commit, base)
            if values is not None:
                return commit, values
            # Retention removed part of it, so a newer one exists, and the listing shows it.
            version = commit.version
            if self.newest_version(fragment, from_version=version) == version:
                *_, way = self._ways(commit, base)
                gone = next((ref.key for ref in way.refs if self.mailbox.get(ref.key, length=0) is None), "data")
                raise CorruptObject(
                    f"{gone!r}, which fragment {fragment} needs at version {version}, its newest, is gone from {self.mailbox!r}: restore it"
                )

    def _newest_commit(self, fragment: int, from_version: int) -> Commit | None:
        versions = [from_version, *self._versions(fragment, from_version)]
        while versions and (version := versions.pop()) > 0:
            try:
                commit = self.commit(fragment, version)
            except CorruptObject as error:
                if versions and version == versions[-1] + 1:
                    raise
                log.warning("passed over, since no version precedes it: %s", error)
                continue
            if commit is None and version > from_version:
                raise CorruptObject(f"{keys.commit(fragment, version)!r} was listed and is gone: commits must never be deleted")
            return commit
        return None

    def initial(self, fragment: int) -> list[Tensor]:
        ref = self.manifest.initial[fragment]
        values = self.tensors(ref, self.layout[fragment])
        if values is None:
            raise CorruptObject(f"{ref.key!r}, the initial value of fragment {fragment}, is gone: restore it or start a new run")
        return values

    def values(self, commit: Commit, base: Base | None = None) -> list[Tensor] | None:
        """The committed fp32 values in layout order; None when retention has removed what they are made of.

        They are the nearest whole value that is there, which may be ``base``, and the updates since.
        """
        for way in self._ways(commit, base):
            try:
                values = self._follow(way, self.layout[commit.fragment])
            except CorruptObject as error:
                if way.sure:
                    raise
                log.warning("fragment %d, version %d: made of its updates instead: %s", commit.fragment, commit.version, error)
                continue
            if values is not None:
                return values
        return None

    def _follow(self, way: _Way, specs: Sequence[TensorSpec]) -> list[Tensor] | None:
        values = way.start
        for ref in way.refs:
            part = self.tensors(ref, specs)
            if part is None:
                return None
            values = part if values is None else total(values, part, specs)
        return values

    def _ways(self, commit: Commit, base: Base | None) -> Iterator[_Way]:
        """The ways to a commit's values, the least to download first; the last one is sure unless retention has passed it."""
        from_base = base is not None and _is_near(base, commit)
        updates: list[DataRef] = []
        while True:
            if commit.whole is not None and not from_base:
                yield _Way(None, [commit.whole, *reversed(updates)], sure=False)
            if commit.parameters is not None and not (from_base and commit.update is not None):
                yield _Way(None, [commit.parameters, *reversed(updates)], sure=True)
                return
            if commit.update is None:
                raise CorruptObject(f"{keys.commit(commit.fragment, commit.version)!r} names neither parameters nor an update")
            updates.append(commit.update)
            if base is not None and base.version == commit.version - 1:
                _check_follows(commit, base.nonce)
                yield _Way(base.values, [*reversed(updates)], sure=True)
                return
            if commit.version == 1:
                yield _Way(None, [self.manifest.initial[commit.fragment], *reversed(updates)], sure=True)
                return
            before = self.committed(commit.fragment, commit.version - 1)
            _check_follows(commit, before.nonce)
            commit = before

    def outer_state(self, commit: Commit) -> list[Tensor] | None:
        """State of the outer optimizer, by parameter; None where the commit has none."""
        if commit.outer is None:
            return None
        state = self.tensors(commit.outer, outer_specs(self.layout[commit.fragment]))
        if state is None:
            raise CorruptObject(f"{commit.outer.key!r}, outer state of fragment {commit.fragment} at version {commit.version}, is gone")
        return state

    def tensors(self, ref: DataRef, specs: Sequence[TensorSpec]) -> list[Tensor] | None:
        data = read_data(self.mailbox, ref, limit_bytes=wire.limit_bytes(specs))
        return None if data is None else wire.decode(data, specs, ref.wire, key=ref.key)

    def publish(self, key: str, tensors: Sequence[Tensor], specs: Sequence[TensorSpec], wire_format: str) -> tuple[DataRef, list[Tensor]]:
        """Write tensors under a key that nobody else writes; returns them as everyone will decode them."""
        data = wire.encode(tensors, specs, wire_format)
        self.mailbox.put(key, data)
        sent = list(tensors) if wire_format == "fp32" else wire.decode(data, specs, wire_format, key=key)
        return reference(key, data, wire=wire_format), sent


def _check_finite(values: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """No progress can be told from a parameter that is not finite."""
    for value, spec in zip(values, specs, strict=True):
        if spec.kind == "parameter" and not value.isfinite().all():
            raise ConfigError(
                f"parameter {spec.name!r} is not finite to begin with: what is to stay as it is should be a buffer, or frozen"
            )


def _is_near(base: Base, commit: Commit) -> bool:
    """Whether the updates since ``base`` are less to download than a whole value, by the size of the last one."""
    whole = commit.parameters or commit.whole
    if commit.update is None or commit.version <= base.version:
        return False
    return whole is None or (commit.version - base.version) * commit.update.size <= whole.size


def _check_follows(commit: Commit, nonce: str) -> None:
    if commit.after not in ("", nonce):
        raise CorruptObject(
            f"{keys.commit(commit.fragment, commit.version)!r} does not follow the version before it as it is known here, which was "
            "deleted and made again: commits must never be deleted. Restart the nodes that came later from a copy of the run"
        )


def _commits(mailbox: Mailbox, prefix: str, after: str = "") -> Iterator[int]:
    for key in mailbox.list(prefix, after=after):
        with suppress(InvalidName):  # not ours
            yield keys.parse_commit(key).version


def outer_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors of the outer optimizer's state: one for each parameter."""
    return [spec for spec in specs if spec.kind == "parameter"]
