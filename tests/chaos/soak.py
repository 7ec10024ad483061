"""One soak: the nodes train, the plan happens, everyone finishes, and the books are checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradientmail_torch.clock import SYSTEM_CLOCK
from tests.chaos.cluster import EXPECTED_ENDS, Cluster, Life, fresh
from tests.chaos.ledger import Ledger, LifeReport
from tests.chaos.schedule import Incident, Plan

STEP_S = 0.1
START_S = 180.0
"""How long the nodes may take to start, to come back, and to finish."""
LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An incident, when it really was."""

    incident: Incident
    began: float
    """Seconds since 1970, as all times here."""
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a soak has left."""

    plan: Plan
    began: float
    """When the last node had begun to train."""
    stopped: float
    """When the nodes were told to finish."""
    happened: list[Happened]
    lives: list[Life]
    ledger: Ledger
    takeovers: int
    notes: list[str]
    problems: list[str]


def run(plan: Plan, directory: Path, *, incidents: Iterable[Incident] | None = None) -> Outcome:
    """``incidents`` are the plan's unless given; none for a quiet run."""
    with Cluster(plan, fresh(directory), step_s=STEP_S) as cluster:
        return _run(plan, cluster, list(plan.incidents() if incidents is None else incidents))


def _run(plan: Plan, cluster: Cluster, incidents: list[Incident]) -> Outcome:
    problems: list[str] = []
    if not cluster.wait_until(lambda: all(node.trains for node in cluster.nodes.values()), START_S):
        problems.append("not all nodes have begun to train")
    began = time.time()
    happened = _happen(plan, cluster, incidents)
    if not cluster.wait_until(lambda: _all_train(cluster), START_S):
        problems.append("not all nodes have come back")
    stopped = time.time()
    cluster.stop_file.touch()
    if not cluster.wait_until(lambda: all(not life.alive for life in cluster.lives), START_S):
        problems.append("not all nodes have finished: " + ", ".join(f"{life.name} lives" for life in cluster.lives if life.alive))
    cluster.look()
    cluster.look_into_the_mailbox()
    ledger = Ledger(cluster.mailbox)
    problems += _check(cluster, ledger)
    return Outcome(
        plan=plan, began=began, stopped=stopped, happened=happened, lives=cluster.lives, ledger=ledger,
        takeovers=len(cluster.takeovers), notes=cluster.notes, problems=problems,
    )  # fmt: skip


def _all_train(cluster: Cluster) -> bool:
    cluster.restart_the_fallen()
    # One that begins after the others have finished would train on alone.
    return all(node.trains and sum(life.alive for life in node.lives) == 1 for node in cluster.nodes.values())


def _happen(plan: Plan, cluster: Cluster, incidents: list[Incident]) -> list[Happened]:
    """Until the plan's time is over and everything that has begun is over too."""
    began = SYSTEM_CLOCK.monotonic()
    waiting, running, happened = list(incidents), [], []
    looked_at = 0.0
    while (now_s := SYSTEM_CLOCK.monotonic() - began) < plan.seconds or running or waiting:
        for incident in [each for each in waiting if each.at_s <= now_s]:
            if any(incident.node and other.node == incident.node for other, _, _ in running):
                continue  # what befalls the node at present has taken longer than planned
            waiting.remove(incident)
            print(f"{now_s:6.1f} s  {incident.kind} {incident.node} for {incident.seconds:.1f} s", file=sys.stderr, flush=True)
            cluster.begin(incident)
            running.append((incident, now_s, time.time()))
        for each in list(running):
            incident, at_s, at = each
            if now_s - at_s >= incident.seconds and (cluster.may_end(incident) or now_s - at_s > incident.seconds + START_S):
                cluster.finish(incident)
                running.remove(each)
                happened.append(Happened(incident=incident, began=at, ended=time.time()))
        SYSTEM_CLOCK.sleep(LOOK_S)
        cluster.look()
        cluster.restart_the_fallen()
        if now_s - looked_at >= 1.0:
            looked_at = now_s
            cluster.look_into_the_mailbox()
    return happened


def _check(cluster: Cluster, ledger: Ledger) -> list[str]:
    problems = [f"the store has created {key} {count} times" for key, count in cluster.created.items() if count > 1 and "/commits/" in key]
    reports = []
    for life in cluster.lives:
        end = life.end or {}
        said = LifeReport(
            name=life.name,
            generation=life.generation,
            steps=life.steps,
            samples=life.samples,
            stats=end.get("stats"),
            digest=end.get("digest", ""),
        )
        reports.append(said)
        if life.ended_by and not any(name in life.ended_by for name in EXPECTED_ENDS):
            problems.append(f"{life.name}, life {life.generation}, has ended by itself: {life.ended_by} (see {life.log})")
    for node in cluster.nodes.values():
        if not any(life.end for life in node.lives):
            problems.append(f"{node.name} has not finished: {node.life.ended_by or 'it is still there'} (see {node.life.log})")
    return problems + ledger.check(reports)
