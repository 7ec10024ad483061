"""Workflows on machines that die, stall and restart, over a store that answers late, twice or not at all."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gradientmail_torch import messages
from gradientmail_torch.errors import CorruptObject, WorkFenced
from gradientmail_torch.patterns.synchronization import Invocation, SynchronizationNode, Workflow
from gradientmail_torch.patterns.synchronization.ledger import Ledger
from gradientmail_torch.testing import Conditions, Process, SimulatedCluster
from gradientmail_torch.testing.simulation import Event

LEASE_S = 30.0
SEEDS = 40
EDGES = {
    "plan": ["train-0", "train-1", "probe"],
    "train-0": ["evaluate"],
    "train-1": ["evaluate"],
    "probe": ["inner"],
    "inner": ["evaluate"],
    "evaluate": ["report"],
}


class Overwriting(Ledger):
    """A planted bug: a retry replaces the marker that stands."""

    def mark(self, node: str, by: str, marker: Any) -> bool:
        self.mailbox.put(self.keys.reached(node, by), messages.encode(marker))
        return True


class Unmarked(Ledger):
    """A planted bug: the payload is written after the marker that names it."""

    def mark(self, node: str, by: str, marker: Any) -> bool:
        self.mailbox.delete(marker.payload.data.key if marker.payload and marker.payload.data else "none")
        return super().mark(node, by, marker)


def simulate(seed: int) -> SimulatedCluster:
    """Three parties that run one workflow, and trouble. Checks the invariants while it runs."""
    rng = random.Random(seed)
    skips = rng.random() < 0.5
    results: list[Any] = []
    with SimulatedCluster(seed, conditions=Conditions.from_rng(rng)) as cluster:

        def party(learner_id: str) -> None:
            own = cluster.rng(f"{learner_id} {len(cluster.processes)}")

            def run(data: dict[str, Any], invocation: Invocation) -> Any:
                assert set(data) | set(invocation.skipped) == set(workflow.dag.predecessors[invocation.node])
                assert list(data) == [name for name in workflow.dag.predecessors[invocation.node] if name in data]
                cluster.clock.sleep(own.choice((0.1, 5.0, 2 * LEASE_S)))
                if invocation.node == "plan":
                    invocation.invoke("probe", "go", conditional=not skips)
                return {invocation.node: data, "large": "x" * 20_000}

            workflow = Workflow(
                EDGES,
                cluster.retrying(),
                learner_id,
                functions=dict.fromkeys(["plan", "train-0", "train-1", "probe", "inner", "evaluate", "report"], run),
                lease=LEASE_S,
                poll_interval=2.0,
                max_attempts=50,
                clock=cluster.clock,
                rng=own,
            )
            workflow.invoke("plan", f"from {learner_id}")
            results.append(workflow.run()["report"])

        created: dict[str, bytes] = {}

        def what_is_created_stays(event: Event) -> None:
            if event.what != "put_if_absent":
                return
            for part in ("reached", "outcomes", "claims", "manifest"):
                for key in cluster.store.list(f"sync/run/workflow/{part}"):
                    found = cluster.store.get(key)
                    assert found is not None
                    assert created.setdefault(key, found) == found, f"{key} has changed"

        def start(learner_id: str) -> None:
            process = cluster.process(learner_id, lambda: party(learner_id))
            trouble = rng.random()
            if trouble < 0.4:
                cluster.at(rng.expovariate(1 / 60), lambda: die(process, learner_id))
            elif trouble < 0.6:
                cluster.at(rng.expovariate(1 / 60), lambda: cluster.pause(process, rng.uniform(1, 300), clock_stops=rng.random() < 0.5))
            elif trouble < 0.7:
                cluster.at(rng.expovariate(1 / 60), lambda: cluster.outage(rng.uniform(1, 200), process))

        def die(process: Process, learner_id: str) -> None:
            cluster.kill(process)
            cluster.at(rng.uniform(0, 60), lambda: start(learner_id))

        cluster.observe(what_is_created_stays)
        for number in range(3):
            cluster.at(rng.uniform(0, 30), lambda learner_id=f"node-{number}": start(learner_id))
        cluster.run(limit_s=6 * 3600)
        assert all(result == results[0] for result in results)
        assert set(results[0].value["report"]["evaluate"]["evaluate"]) == {"train-0", "train-1"} | (set() if skips else {"inner"})
        return cluster


def test_a_workflow_has_one_outcome_whatever_happens() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        cluster = simulate(seed)
        happened.update(event.what for event in cluster.log)
        happened.update(event.outcome for event in cluster.log if event.what == "put_if_absent")
    for what in ("kill", "pause", "outage", "answer lost", "refused", "exists"):
        assert happened[what] > 10, f"{what!r} came up {happened[what]} times: the seeds no longer try it"


@pytest.mark.parametrize(("bug", "caught_by"), [(Overwriting, "has changed"), (Unmarked, "is gone")])
def test_a_planted_bug_is_caught(bug: type[Ledger], caught_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradientmail_torch.patterns.synchronization.party.Ledger", bug)
    with pytest.raises((AssertionError, CorruptObject), match=caught_by):
        _ = [simulate(seed) for seed in range(20)]


def test_12_a_function_of_three_leases_that_beats_is_not_taken_over() -> None:
    with SimulatedCluster(0) as cluster:
        ran = []

        def party(learner_id: str) -> object:
            def slow(data: dict[str, Any], invocation: Invocation) -> str:
                ran.append((learner_id, invocation.attempt))
                cluster.clock.sleep(3 * LEASE_S)
                return learner_id

            node = SynchronizationNode(
                "n",
                ["a", "b"],
                cluster.retrying(),
                learner_id,
                lease=LEASE_S,
                poll_interval=2.0,
                clock=cluster.clock,
                rng=cluster.rng(learner_id),
            )
            node.call(learner_id)
            return node.wait(slow).value

        parties = [cluster.process(name, lambda name=name: party(name)) for name in "ab"]
        cluster.run(limit_s=3600)
    assert len(ran) == 1
    assert {party.value for party in parties} == {ran[0][0]}


def test_11_a_zombie_that_was_suspended_in_its_function_is_told_it_was_fenced() -> None:
    with SimulatedCluster(0) as cluster:

        def party(learner_id: str) -> object:
            def slow(data: dict[str, Any], invocation: Invocation) -> str:
                cluster.clock.sleep(10.0)
                return learner_id

            node = SynchronizationNode(
                "n",
                ["a"],
                cluster.retrying(),
                learner_id,
                lease=LEASE_S,
                poll_interval=2.0,
                clock=cluster.clock,
                rng=cluster.rng(learner_id),
            )
            node.call("a")
            try:
                return node.wait(slow).value
            except WorkFenced as error:
                return str(error), node.wait(slow).value

        zombie = cluster.process("zombie", lambda: party("zombie"))
        heir = cluster.process("heir", lambda: party("heir"), delay_s=3.0)
        cluster.at(6.0, lambda: cluster.pause(zombie, 300.0))
        cluster.run(limit_s=3600)
    assert heir.value == "heir"
    assert isinstance(zombie.value, tuple)
    assert "was taken over: attempt 2 of heir-" in zombie.value[0]
    assert zombie.value[1] == "heir"


def test_the_outcome_reaches_a_waiting_party_within_one_poll_and_one_round_trip() -> None:
    with SimulatedCluster(0, conditions=Conditions(latency_s=(0.1, 0.1))) as cluster:
        seen: dict[str, float] = {}

        def party(learner_id: str) -> None:
            node = SynchronizationNode(
                "n",
                ["a", "b"],
                cluster.retrying(),
                learner_id,
                lease=LEASE_S,
                poll_interval=2.0,
                clock=cluster.clock,
                rng=cluster.rng(learner_id),
            )
            node.call(learner_id)
            node.wait(lambda data, invocation: cluster.clock.sleep(7.3))
            seen[learner_id] = cluster.now_s

        for number, name in enumerate("ab"):
            cluster.process(name, lambda name=name: party(name), delay_s=5.0 * number)
        cluster.run(limit_s=3600)
        committed = next(event.at_s for event in cluster.log if event.what == "put_if_absent" and "/outcomes/" in event.key)
    assert max(seen.values()) - committed <= 2.0 + 0.1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread_s", [0.0, 1.0, 60.0])
def test_a_fan_in_of_64_costs_two_puts_per_predecessor_and_four_for_the_node(seed: int, spread_s: float) -> None:
    """However they arrive, with payloads that are objects of their own, and all of them waiting to run the function."""
    names = [f"shard-{number}" for number in range(64)]
    with SimulatedCluster(seed, conditions=Conditions(latency_s=(0.01, 0.1))) as cluster:

        def party(number: int) -> object:
            cluster.clock.sleep(cluster.rng(f"arrival {number}").uniform(0.0, spread_s))
            node = SynchronizationNode(
                "n", names, cluster.retrying(), names[number], poll_interval=1.0, clock=cluster.clock, rng=cluster.rng(names[number])
            )
            node.call(names[number], b"x" * 20_000)
            return node.wait(lambda data, invocation: len(data)).value

        first = cluster.process("first", lambda: SynchronizationNode("n", names, cluster.retrying(), "first", clock=cluster.clock))
        cluster.run(limit_s=60)
        parties = [cluster.process(name, lambda number=number: party(number)) for number, name in enumerate(names)]
        cluster.run(limit_s=3600)
    assert [party.value for party in parties] == [64] * 64
    assert first.main is not None
    assert sum(event.what in ("put", "put_if_absent") for event in cluster.log) <= 2 * 64 + 4
