"""One training by real sessions on a simulated cluster: the loss depends on the settings alone, not on this machine.

Steps, uploads and polls take virtual time, so that commits come as late as a slow link would bring them, and nodes
are as unequal as is asked for, while the run costs no more than its arithmetic. One seed gives one run.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import work
from gradientmail_torch import align
from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo, DiLoCo, LocalSGD, OuterSGD
from gradientmail_torch.cli.plan import BYTES_PER_PARAMETER
from gradientmail_torch.session import Session
from gradientmail_torch.testing.simulation import Conditions, SimulatedCluster

STEP_S = 1.0
"""Virtual seconds of a step on the fastest node."""
ALGORITHMS: Mapping[str, type[Algorithm]] = {kind.__name__: kind for kind in (DecoupledDiLoCo, DiLoCo, LocalSGD)}
BASE: Mapping[str, Any] = {
    "sync_every": 20,
    "fragments": 1,
    "adoption": "overwrite",
    "called": True,
    "merge": "auto",
    "wire": "bf16",
    "commit_wire": "bf16",
}
"""What a DecoupledDiLoCo has that does not say otherwise, whatever the defaults of the package come to be."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is trained, and how. Everything that the outcome depends on, but for the seed."""

    algorithm: str = "DecoupledDiLoCo"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the algorithm; ``outer`` as a mapping."""
    speeds: tuple[float, ...] = (1.0, 1.0)
    """Of each node, in steps per virtual second."""
    late_steps: float = 0.0
    """Steps of the fastest node that the bytes of a contribution and its commit are on their way."""
    poll_s: float = 1.0
    """Virtual seconds between two looks at the mailbox."""
    own_data: bool = False
    """Each node draws from a part of the text of its own."""
    joins_at: float = 0.0
    """Share of the training at which the last node joins."""
    rewarm_steps: int = 0
    """Steps over which the joiner's learning rate rises from zero."""
    warm_start: bool = False
    """The joiner begins with the inner optimizer of the first node as it is then: the best that a published snapshot could give."""
    tokens: int = 614_400
    """Over all nodes."""
    precision: str = "bf16"
    """Of the forward and backward passes; fp32 takes this machine 2.3 times as long, and the losses agree."""

    @property
    def rows(self) -> int:
        """Rows of a node's batch."""
        return work.GLOBAL_ROWS // len(self.speeds)

    def steps(self) -> list[int]:
        """Steps of each node, in proportion to its speed and to the time that it is there."""
        shares = [*self.speeds]
        shares[-1] *= 1 - self.joins_at
        whole = self.tokens / (self.rows * work.CONTEXT)
        return [round(whole * share / sum(shares)) for share in shares]

    def resolved(self) -> dict[str, Any]:
        """All settings that decide the outcome."""
        return {**(BASE if self.algorithm == "DecoupledDiLoCo" else {"sync_every": BASE["sync_every"]}), **self.settings}

    def build(self) -> Algorithm:
        settings = self.resolved()
        if "outer" in settings:
            settings["outer"] = OuterSGD(**settings["outer"])
        if self.algorithm != "DecoupledDiLoCo":
            settings["parties"] = len(self.speeds)
        return ALGORITHMS[self.algorithm](**settings)


def run(experiment: Experiment, seed: int) -> dict[str, Any]:
    """Train, and return the loss of the run's parameters and what the nodes saw."""
    algorithm = experiment.build()
    steps = experiment.steps()
    virtual_s = max(n / speed for n, speed in zip(steps, experiment.speeds, strict=True)) * STEP_S
    losses: dict[str, float] = {}
    with SimulatedCluster(seed, conditions=Conditions(latency_s=(0.02, 0.2)), log_events=200) as cluster:

        def look(share: float) -> None:
            model = work.make_model(seed)
            align(model, mailbox=cluster.store)
            losses[f"{share:g}"] = work.validation_loss(model, rows=64)

        nodes = [_Node(experiment, algorithm, cluster, seed, number, steps) for number in range(len(steps))]
        for node in nodes:
            late = node.number == len(nodes) - 1
            delay_s = experiment.joins_at * virtual_s if late else 0.0
            cluster.process(
                node.name, partial(node.train, nodes[0]), delay_s=delay_s, up_bytes_per_s=_rate(experiment, algorithm, len(nodes))
            )
        cluster.at(0.5 * virtual_s, lambda: look(0.5))
        cluster.run()
        model = work.make_model(seed)
        versions = align(model, mailbox=cluster.store)
        figures = [process.value for process in cluster.processes]
        loss = work.validation_loss(model)
        virtual_s = cluster.now_s
    return {"loss": loss, "losses": losses, "versions": versions, "virtual_s": round(virtual_s, 1), "nodes": figures}


def average_gradients(seed: int, *, precision: str, tokens: int = 614_400) -> dict[str, Any]:
    """The same batches with the gradients averaged at each step, as DDP does it."""
    model = work.make_model(seed)
    optimizer = work.make_optimizer(model)
    steps = tokens // work.TOKENS_PER_STEP
    losses: dict[str, float] = {}
    for step in range(steps):
        work.set_rate(optimizer, step, steps)
        work.train_step(model, optimizer, work.batch(step, seed=seed), precision=precision)
        if step + 1 == steps // 2:
            losses["0.5"] = work.validation_loss(model, rows=64)
    return {"loss": work.validation_loss(model), "losses": losses}


class _Node:
    def __init__(
        self, experiment: Experiment, algorithm: Algorithm, cluster: SimulatedCluster, seed: int, number: int, steps: list[int]
    ) -> None:
        self.experiment, self.algorithm, self.cluster, self.seed, self.number = experiment, algorithm, cluster, seed, number
        self.name = f"node-{number}"
        self.steps = steps[number]
        self.nodes = len(steps)
        self.model = work.make_model(seed)
        self.optimizer = work.make_optimizer(self.model)

    def train(self, example: _Node) -> dict[str, Any]:
        """Train to the end; a joiner with a warm start takes its inner optimizer's state from ``example``."""
        experiment, clock = self.experiment, self.cluster.clock
        model, optimizer = self.model, self.optimizer
        shard = (self.number / self.nodes, (self.number + 1) / self.nodes) if experiment.own_data else (0.0, 1.0)
        late = self.number == self.nodes - 1 and experiment.joins_at > 0
        missed = round(experiment.joins_at * (self.steps / (1 - experiment.joins_at))) if late else 0
        if late and experiment.warm_start:
            optimizer.load_state_dict(copy.deepcopy(example.optimizer.state_dict()))
        lateness = Lateness()
        session = Session(
            model,
            mailbox=self.cluster.retrying(),
            learner_id=self.name,
            algorithm=self.algorithm,
            poll_interval=experiment.poll_s,
            clock=clock,
        )
        with session:
            for step in range(self.steps):
                work.set_rate(optimizer, missed + step, missed + self.steps)
                if late and step < experiment.rewarm_steps:
                    for group in optimizer.param_groups:
                        group["lr"] *= (step + 1) / experiment.rewarm_steps
                windows = work.batch(missed + step, seed=self.seed, node=self.number, nodes=self.nodes, shard=shard)
                work.train_step(model, optimizer, windows, precision=experiment.precision)
                clock.sleep(STEP_S / experiment.speeds[self.number])
                session.step(samples=experiment.rows)
                lateness.look(session, step)
        stats = session.stats()
        return {
            "steps": stats.steps,
            "contributions": stats.tally.merged,
            "discarded_steps": stats.tally.discarded_work.steps,
            "late_steps": lateness.mean(),
            "bytes_up": stats.usage.bytes_up,
            "bytes_down": stats.usage.bytes_down,
            "requests": sum(stats.usage.requests.values()),
        }


class Lateness:
    """Own steps between taking a contribution and adopting its commit."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[str, int]] = {}
        self._seen: list[int] = []

    def look(self, session: Session, step: int) -> None:
        assert session._replica is not None
        for fragment in session._replica.fragments:
            nonce, taken_at = self._taken.get(fragment.index, ("", 0))
            pending = fragment.pending
            if nonce and (pending is None or pending.nonce != nonce):
                self._seen.append(step - taken_at)
                del self._taken[fragment.index]
            if pending is not None and pending.nonce != nonce:
                self._taken[fragment.index] = (pending.nonce, step)

    def mean(self) -> float:
        return round(statistics.fmean(self._seen), 2) if self._seen else 0.0


def _rate(experiment: Experiment, algorithm: Algorithm, nodes: int) -> float:
    """Bytes per virtual second at which contribution and commit together are ``late_steps`` on their way."""
    if experiment.late_steps <= 0:
        return float("inf")
    numel = sum(parameter.numel() for parameter in work.make_model(0).parameters()) / (algorithm.fragments or 1)
    return numel * (BYTES_PER_PARAMETER[algorithm.wire] + BYTES_PER_PARAMETER[algorithm.commit_wire]) / (experiment.late_steps * STEP_S)
