"""What happens in a simulated training, drawn from a seed: who trains how, over which network, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo, DiLoCo, LocalSGD, OuterSGD
from gradientmail_torch.testing.network import Conditions

NAMES = "abcde"
CROWD = "fghi"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """One learner's training. A life that is restarted trains half as many steps."""

    name: str
    steps: int
    seconds_per_step: float
    starts_at_s: float = 0.0
    upload_s: float = 0.0
    """How long each object of tensors takes it to upload, beyond the network's latency."""
    poisoned_at: int | None = None
    """After this step its parameters are not finite."""
    waits: tuple[tuple[int, float], ...] = ()
    """At which steps it waits at a barrier, and for how many seconds at most."""
    stuck: bool = False
    """It claims rounds and never merges them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that befalls a learner, or all of them where ``who`` is empty."""

    what: str
    """kill | pause | outage | double | alter | remove | alter extras; the last three befall tensors in the mailbox:
    contributions, and what they can do without: sums ahead of a merge, whole values that have followed their commit."""
    at_s: float
    who: str = ""
    seconds: float = 0.0
    clock_stops: bool = False
    restart_after_s: float | None = None
    """Seconds after which the learner is started anew; a paused one then has a rival under its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    conditions: Conditions
    algorithm: Algorithm
    settings: Mapping[str, Any]
    """Of :class:`~gradientmail_torch.session.Session`."""
    learners: tuple[LearnerPlan, ...]
    troubles: tuple[Trouble, ...]
    start_barrier: bool
    queue: bool
    """Steps are items of a Shared Queue instead of a number for each learner."""
    report: bool
    """When all is trained, the results meet at a synchronization node."""
    large: bool
    """Each looks only at the rounds that may concern it, as in a run of very many."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {_brief(self.algorithm)}", f"  {dict(self.settings)}", f"  {_brief(self.conditions)}"]
        flags = [name for name in ("start_barrier", "queue", "report", "large") if getattr(self, name)]
        return "\n".join(
            [*lines, *(f"  with {flag}" for flag in flags), *(f"  {_brief(each)}" for each in (*self.learners, *self.troubles))]
        )

    @property
    def blocking(self) -> bool:
        return self.algorithm.blocking

    @property
    def slowest_request_s(self) -> float:
        """Of one request that is answered, without the time that its sender was suspended."""
        network = self.conditions
        return network.latency_s[1] + (network.slow_s if network.slow_share else 0) + (network.hiccup_s if network.hiccup_share else 0.1)

    @classmethod
    def draw(cls, seed: int) -> Self:
        """Anything from a quiet run to one in which nearly everything goes wrong."""
        rng = random.Random(f"training {seed}")
        conditions = Conditions.from_rng(rng)
        count = rng.choice((2, 2, 3, 3, 4, 5))
        crowd = _crowd(seed)
        learners = (*(_learner(rng, name) for name in NAMES[:count]), *crowd)
        poll_interval = _looks(seed, rng.choice((1.0, 1.0, 2.0)))
        return cls(
            seed=seed,
            conditions=conditions,
            algorithm=_sparse(_with_groups(_algorithm(rng, count), seed, crowd=bool(crowd)), seed),
            settings={
                "lease": rng.choice((12.0, 12.0, 24.0)),
                "poll_interval": poll_interval,
                "outage_timeout": 200.0,
                "step_timeout": 300.0,
                "keep": rng.choice((1, 2, 2, 4, None)),
                "keep_seconds": rng.choice((0.0, 5.0, 30.0)),
            },
            learners=learners,
            troubles=(*_troubles(rng, learners), *_spoilt_rounds(seed), *_spoilt_extras(seed)),
            start_barrier=rng.random() < 0.3,
            queue=rng.random() < 0.1,
            report=rng.random() < 0.1,
            large=random.Random(f"listing {seed}").random() < 0.08,
        )


def _algorithm(rng: random.Random, learners: int) -> Algorithm:
    fragments = rng.choice((1, 1, 2))
    merge: Any = rng.choice(("auto", "auto", "mean", "rda"))
    if rng.random() < 0.05:
        kind: Any = rng.choice((DiLoCo, LocalSGD))
        return kind(sync_every=rng.choice((2, 5)), parties=rng.choice((1, learners)))  # type: ignore[no-any-return]
    rounds: dict[str, Any] = {"round_samples": rng.choice((20, 60))} if rng.random() < 0.1 else {}
    return DecoupledDiLoCo(
        sync_every=rng.choice((3, 4, 8)),
        fragments=fragments,
        outer=rng.choice(
            (OuterSGD(), OuterSGD(), OuterSGD(lr=0.7, momentum=0.5, warmup=rng.random() < 0.5), OuterSGD(momentum=0.5, nesterov=False))
        ),
        merge=merge,
        wire=rng.choice(("fp32", "bf16")),
        commit_wire=rng.choice(("fp32", "bf16", "bf16")),
        whole_every=rng.choice((2, 3, 5)),
        quorum_size=2 if rng.random() < 0.3 else 1,
        grace=rng.choice((None, 0.0, 3.0, 8.0)),
        adoption=rng.choice(("rebase",) * 9 + ("overwrite",)),
        called=rng.random() < 0.7,
        **rounds,
    )


def _learner(rng: random.Random, name: str) -> LearnerPlan:
    steps = rng.randint(8, 40)
    return LearnerPlan(
        name=name,
        steps=steps,
        seconds_per_step=rng.choice((0.5, 1.0, 1.0, 2.0, 5.0)),
        starts_at_s=rng.choice((0.0, 0.0, 0.0, rng.uniform(0, 40))),
        upload_s=rng.choice((10.0, 30.0)) if rng.random() < 0.12 else 0.0,
        poisoned_at=rng.randint(2, steps - 2) if rng.random() < 0.06 else None,
        waits=((rng.randint(2, steps - 2), rng.uniform(5, 40)),) if rng.random() < 0.25 else (),
        stuck=rng.random() < 0.04,
    )


def _crowd(seed: int) -> tuple[LearnerPlan, ...]:
    """In some seeds, more learners, so that groups are summed ahead."""
    rng = random.Random(f"crowd {seed}")
    return tuple(_learner(rng, name) for name in CROWD) if rng.random() < 0.15 else ()


def _with_groups(algorithm: Algorithm, seed: int, *, crowd: bool) -> Algorithm:
    """Rounds of which parts are summed ahead; in a crowd they wait, so that they are large."""
    fan_in = random.Random(f"fan-in {seed}").choice((2, 2, 3, 32))
    if crowd and isinstance(algorithm, DecoupledDiLoCo):
        return replace(algorithm, fan_in=fan_in, grace=8.0, called=True)
    return replace(algorithm, fan_in=fan_in)


def _sparse(algorithm: Algorithm, seed: int) -> Algorithm:
    """In some seeds contributions leave out most of what they could bring, which stays local progress."""
    rng = random.Random(f"sparse {seed}")
    keeps = isinstance(algorithm, DecoupledDiLoCo) and algorithm.adoption_rule == "rebase"
    return replace(algorithm, wire="sparse") if keeps and rng.random() < 0.12 else algorithm


def _looks(seed: int, poll_interval: float) -> float | None:
    """In some seeds each learner looks as often as its own cycles ask for."""
    return None if random.Random(f"looks {seed}").random() < 0.12 else poll_interval


def _troubles(rng: random.Random, learners: tuple[LearnerPlan, ...]) -> tuple[Trouble, ...]:
    found = []
    for learner in learners:
        at_s, chance = rng.uniform(1, 90), rng.random()
        again = rng.choice((None, rng.uniform(0, 15), rng.uniform(0, 60)))
        if chance < 0.15:
            found.append(Trouble(what="kill", who=learner.name, at_s=at_s, restart_after_s=again))
        elif chance < 0.3:
            seconds = rng.choice((4.0, 10.0, 30.0, 100.0))
            again = again if rng.random() < 0.5 else None
            stops = rng.random() < 0.4
            found.append(Trouble(what="pause", who=learner.name, at_s=at_s, seconds=seconds, clock_stops=stops, restart_after_s=again))
        elif chance < 0.36:
            found.append(Trouble(what="outage", who=learner.name, at_s=at_s, seconds=rng.choice((5.0, 15.0, 40.0, 100.0))))
        elif chance < 0.4:
            found.append(Trouble(what="double", who=learner.name, at_s=rng.choice((0.0, at_s))))
        elif chance < 0.44:
            found.append(Trouble(what=rng.choice(("alter", "remove")), who=learner.name, at_s=at_s))
    if rng.random() < 0.15:
        found.append(Trouble(what="outage", at_s=rng.uniform(0, 90), seconds=rng.choice((3.0, 10.0, 20.0, 60.0, 300.0))))
    return tuple(found)


def _spoilt_rounds(seed: int) -> list[Trouble]:
    """In some seeds, moments from which on everything that is on its way into a commit is spoilt."""
    rng = random.Random(f"spoilt rounds {seed}")
    return [Trouble(what="alter", at_s=rng.uniform(1, 60), seconds=rng.choice((1.0, 10.0)))] if rng.random() < 0.05 else []


def _spoilt_extras(seed: int) -> list[Trouble]:
    """In some seeds, a time for which all sums ahead, and whole values that follow their commit, are spoilt."""
    rng = random.Random(f"spoilt wholes {seed}")
    return [Trouble(what="alter extras", at_s=rng.uniform(1, 60), seconds=rng.choice((10.0, 60.0)))] if rng.random() < 0.15 else []


def _brief(value: Any) -> str:
    """A dataclass without the fields that are as by default."""
    shown = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(shown)})"
