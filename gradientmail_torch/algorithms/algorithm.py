"""The algorithms: when a learner contributes, when a round closes, how it is merged and adopted.

:class:`Algorithm` is all that the session asks of one. Settings that every learner of a run must share are
written into the run's manifest; the others may differ from node to node.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass, field
from typing import Literal

from gradientmail_torch.algorithms.adoption import AdoptionRule
from gradientmail_torch.algorithms.merge import Method, choose
from gradientmail_torch.algorithms.outer import OuterSGD
from gradientmail_torch.algorithms.wire import COMMIT_WIRES, WIRES, CommitWire, Wire
from gradientmail_torch.errors import ConfigError

HEARD_WITHIN_POLLS = 5
"""Within so many poll intervals a learner hears that it is called and answers."""
MergeRule = Literal["auto", "mean", "rda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a learner knows of its own speed."""

    seconds_per_step: float = 0.0
    poll_interval: float = 1.0
    merge_seconds: float = 0.0
    """Moving average of the time from closing a round to its commit."""


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):  # noqa: B024 (a dataclass without such a base is final to jsonargparse, which reads the YAMLs)
    """Base of the algorithms.

    Args:
        sync_every: optimizer steps between two contributions to a fragment (H).
        fragments: parts of the model that are synchronised on staggered schedules; None chooses by size.
        outer: what a commit does with the merged delta.
        merge: ``mean``, ``rda``, or ``auto``: the mean up to three contributions, RDA from four on.
        wire: number format of contributions. ``sparse`` leaves out all but the largest changes, which follow when they have grown.
        commit_wire: number format of commits: ``fp32`` sends the whole fragment, the others what has changed.
        whole_every: with such updates, a commit in so many waits until the whole fragment is in the mailbox as well. The
            value of the others follows them, where the uplink has time for it; who joins reads the newest that is there.
        fan_in: contributions that one learner reads for a commit. Where the commit before had more, groups of about so many
            are summed ahead, each by one of its members, and the syncer reads the sums.
        buffers: whether buffers (BatchNorm statistics) travel.
        max_staleness: cycles of own steps on one base beyond which a warning is given.
    """

    sync_every: int = 20
    fragments: int | None = None
    outer: OuterSGD = field(default_factory=OuterSGD)
    merge: MergeRule = "auto"
    wire: Wire = "bf16"
    commit_wire: CommitWire = "bf16"
    whole_every: int = 4
    fan_in: int = 32
    buffers: bool = True
    max_staleness: int = 2

    def __post_init__(self) -> None:
        _require(_whole(self.sync_every, 1), "sync_every", "at least 1 step", self.sync_every)
        _require(self.fragments is None or _whole(self.fragments, 1), "fragments", "None or at least 1", self.fragments)
        _require(isinstance(self.outer, OuterSGD), "outer", "an OuterSGD", self.outer)
        _require(self.merge in ("auto", "mean", "rda"), "merge", "'auto', 'mean' or 'rda'", self.merge)
        _require(self.wire in WIRES, "wire", f"one of {', '.join(WIRES)}", self.wire)
        _require(self.commit_wire in COMMIT_WIRES, "commit_wire", f"one of {', '.join(COMMIT_WIRES)}", self.commit_wire)
        keeps = self.adoption_rule == "rebase"
        _require(self.wire != "sparse" or keeps, "wire", "another, as only adoption='rebase' keeps what 'sparse' leaves out", self.wire)
        _require(_whole(self.whole_every, 1), "whole_every", "at least 1", self.whole_every)
        _require(_whole(self.fan_in, 2), "fan_in", "at least 2", self.fan_in)
        _require(isinstance(self.buffers, bool), "buffers", "True or False", self.buffers)
        _require(_whole(self.max_staleness, 1), "max_staleness", "at least 1 cycle", self.max_staleness)

    @property
    def quorum(self) -> int:
        """Contributions that a round needs before it may close."""
        return 1

    @property
    def blocking(self) -> bool:
        """Whether a learner waits for the commit of what it has contributed before it trains on."""
        return False

    @property
    def adoption_rule(self) -> AdoptionRule:
        return "overwrite"

    @property
    def calls(self) -> bool:
        """Whether another learner's contribution to the open round makes this learner's due."""
        return False

    def grace_s(self, pace: Pace) -> float:
        """Seconds that a round with its quorum waits for the other learners in training."""
        return 0.0

    def first_step_due(self, fragment: int, fragments: int) -> int:
        """Steps after joining at which a fragment is first due: staggered over one cycle."""
        return max(1, math.ceil(self.sync_every * (fragment + 1) / fragments))

    def samples_due(self, learners: int) -> int | None:
        """Samples since the last contribution that make the next one due; None where steps decide."""
        return None

    def merge_method(self, contributions: int) -> Method:
        return choose(self.merge, contributions)

    def commits_whole(self, version: int) -> bool:
        """Whether the commit of ``version`` holds the whole fragment."""
        return self.last_whole(version) == version

    def last_whole(self, version: int) -> int:
        """The newest version up to ``version`` whose value is whole in the mailbox; 0 is the initial one."""
        return version if self.commit_wire == "fp32" else version - version % self.whole_every

    def shared(self) -> dict[str, str | int | float | bool | None]:
        """The settings that all learners of a run must share, flat."""
        outer = {f"outer.{name}": getattr(self.outer, name) for name in ("lr", "momentum", "nesterov", "warmup")}
        commits = {"commit_wire": self.commit_wire, "whole_every": self.whole_every, "fan_in": self.fan_in}
        return {"name": type(self).__name__, "merge": self.merge, "buffers": self.buffers, "quorum": self.quorum, **commits, **outer}


@dataclass(frozen=True, kw_only=True)
class DecoupledDiLoCo(Algorithm):
    """Learners that never wait for each other (Douillard et al. 2026, arXiv 2604.21428).

    A round closes with ``quorum_size`` contributions after a grace for the other live learners. Steps go on
    meanwhile; adopting a commit keeps the local steps that it does not hold.

    Args:
        quorum_size: contributions that a round needs (K).
        grace: seconds that a round with its quorum waits for the others; None adapts: as long as the commit
            would still come within ``overlap_steps`` steps (half a cycle unless given), at most ``max_grace`` seconds.
        round_samples: size rounds by samples over all live learners instead of by ``sync_every`` steps.
        adoption: ``rebase`` keeps local progress, ``overwrite`` takes the commit, ``mix`` goes half way.
        called: contribute early when another learner's contribution is already in the open round.
    """

    quorum_size: int = 1
    grace: float | None = None
    max_grace: float = 30.0
    overlap_steps: int | None = None
    round_samples: int | None = None
    adoption: AdoptionRule = "rebase"
    called: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(_whole(self.quorum_size, 1), "quorum_size", "at least 1", self.quorum_size)
        _require(self.grace is None or _seconds(self.grace), "grace", "None or at least 0 seconds", self.grace)
        _require(_seconds(self.max_grace), "max_grace", "at least 0 seconds", self.max_grace)
        _require(self.overlap_steps is None or _whole(self.overlap_steps, 0), "overlap_steps", "None or at least 0", self.overlap_steps)
        _require(self.round_samples is None or _whole(self.round_samples, 1), "round_samples", "None or at least 1", self.round_samples)
        _require(self.adoption in ("rebase", "overwrite", "mix"), "adoption", "'rebase', 'overwrite' or 'mix'", self.adoption)

    @classmethod
    def pretrain(cls) -> DecoupledDiLoCo:
        """For long runs from scratch: longer cycles, some outer momentum."""
        return cls(sync_every=50, outer=OuterSGD(lr=0.7, momentum=0.5))

    @classmethod
    def finetune(cls) -> DecoupledDiLoCo:
        """For short runs on a trained model: plain averaging, short cycles."""
        return cls(sync_every=20)

    @property
    def quorum(self) -> int:
        return self.quorum_size

    @property
    def adoption_rule(self) -> AdoptionRule:
        return self.adoption

    @property
    def calls(self) -> bool:
        return self.called

    def grace_s(self, pace: Pace) -> float:
        if self.grace is not None:
            return self.grace
        overlap = self.overlap_steps if self.overlap_steps is not None else self.sync_every / 2
        slack = overlap * pace.seconds_per_step - pace.merge_seconds
        # A learner that is called answers after it has seen the call: give it the time that this takes.
        return min(self.max_grace, max(slack, HEARD_WITHIN_POLLS * pace.poll_interval))

    def samples_due(self, learners: int) -> int | None:
        return None if self.round_samples is None else math.ceil(self.round_samples / max(1, learners))


@dataclass(frozen=True, kw_only=True)
class _Synchronous(Algorithm):
    parties: int = 1
    fragments: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(_whole(self.parties, 1), "parties", "at least 1", self.parties)

    @property
    def quorum(self) -> int:
        return self.parties

    @property
    def blocking(self) -> bool:
        return True

    def first_step_due(self, fragment: int, fragments: int) -> int:
        return self.sync_every

    def shared(self) -> dict[str, str | int | float | bool | None]:
        return super().shared() | {"sync_every": self.sync_every}


@dataclass(frozen=True, kw_only=True)
class DiLoCo(_Synchronous):
    """Every ``sync_every`` steps all ``parties`` wait for each other (arXiv 2311.08105).

    The outer optimizer is the paper's: SGD with Nesterov momentum, 0.7 and 0.9.
    """

    outer: OuterSGD = field(default_factory=lambda: OuterSGD(lr=0.7, momentum=0.9, warmup=False))
    merge: MergeRule = "mean"
    wire: Wire = "fp32"
    commit_wire: CommitWire = "fp32"


@dataclass(frozen=True, kw_only=True)
class LocalSGD(_Synchronous):
    """Every ``sync_every`` steps all ``parties`` take the weighted average of their parameters (arXiv 1805.09767)."""

    merge: MergeRule = "mean"
    wire: Wire = "fp32"
    commit_wire: CommitWire = "fp32"


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _seconds(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _require(holds: bool, field_name: str, allowed: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{field_name} must be {allowed}, not {value!r}")
