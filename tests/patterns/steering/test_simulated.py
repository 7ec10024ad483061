"""Steering on machines that die, stall and restart, over a store that answers late, twice or not at all."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from gradientmail_torch.keys import parse_request
from gradientmail_torch.patterns.leased_work import LeasedWork, Outcome
from gradientmail_torch.patterns.steering import MailboxQueues, MailboxTaskServer
from gradientmail_torch.testing import Conditions, Process, SimulatedCluster
from gradientmail_torch.testing.simulation import Event

NODES = 3
TASKS = 12
LEASE_S = 30.0
SEEDS = 25
QUEUE = "steering/campaign/"


class Overwriting(LeasedWork):
    """A planted bug: a zombie's outcome replaces the one that stands."""

    def _settle(self, outcome: Outcome) -> Outcome:
        self._mailbox.delete(self._keys.outcome(outcome.item))
        return super()._settle(outcome)


def simulate(seed: int, work: type[LeasedWork], monkeypatch: pytest.MonkeyPatch) -> SimulatedCluster:
    """A Thinker and three nodes, all of which may die or lose the store. Checks the invariants while it runs."""
    monkeypatch.setattr("gradientmail_torch.patterns.steering.queues.claims.LeasedWork", work)
    rng = random.Random(seed)
    begun: Counter[tuple[str, int]] = Counter()
    notes: dict[str, list[int]] = {"sent": [], "dealt with": []}  # what the Thinker would keep on a disk
    acknowledged: set[str] = set()

    with SimulatedCluster(seed, conditions=Conditions.from_rng(rng)) as cluster:

        def queues(who: str) -> MailboxQueues:
            own = cluster.rng(f"{who} {len(cluster.processes)}")
            settings = {"poll_interval": 2.0, "lease": LEASE_S, "max_attempts": 50, "auto_ack": False, "outage_timeout": 3600.0}
            return MailboxQueues(cluster.retrying(), name="campaign", **settings, clock=cluster.clock, rng=own)

        def work_on(number: int, seconds: float, _result: Any) -> int:
            attempt = (_result.task_id, _result.worker_info.attempt)
            begun[attempt] += 1
            assert begun[attempt] == 1, f"{attempt} was run twice"
            cluster.clock.sleep(seconds)
            return number

        def node(name: str) -> None:
            MailboxTaskServer([work_on], queues(name), learner_id=name, isolation="thread", outage_timeout_s=3600.0).run()

        def think() -> None:
            mine = queues("thinker")
            mine.recover()
            own = cluster.rng(f"thoughts {len(cluster.processes)}")
            for number in range(TASKS):
                if number not in notes["sent"]:
                    mine.send_inputs(number, own.choice((0.1, 5.0, 2 * LEASE_S)), method="work_on", task_info={"number": number})
                    notes["sent"].append(number)
            while mine.active_count:
                result = mine.get_result()
                assert result.success, result.failure_info
                assert result.value == result.task_info["number"]
                notes["dealt with"].append(result.value)
                mine.ack(result)
                acknowledged.add(result.task_id)
            mine.send_kill_signal()

        committed: dict[str, bytes] = {}

        def results_stay(event: Event) -> None:
            for key in cluster.store.list(f"{QUEUE}results/"):
                found = cluster.store.get(key)
                assert found is not None
                assert committed.setdefault(key, found) == found, f"{key} has changed"
            assert set(committed) == set(cluster.store.list(f"{QUEUE}results/")), "a result is gone"

        def start(name: str, function: Any) -> None:
            process = cluster.process(name, function)
            trouble = rng.random()
            if trouble < 0.4:
                cluster.at(rng.expovariate(1 / 60), lambda: die(process, name, function))
            elif trouble < 0.6:
                cluster.at(rng.expovariate(1 / 60), lambda: cluster.pause(process, rng.uniform(1, 300), clock_stops=rng.random() < 0.5))
            elif trouble < 0.7:
                cluster.at(rng.expovariate(1 / 60), lambda: cluster.outage(rng.uniform(1, 200), process))

        def die(process: Process, name: str, function: Any) -> None:
            if process.alive:
                cluster.kill(process)
                cluster.at(rng.uniform(0, 60), lambda: start(name, function))

        cluster.observe(results_stay)
        cluster.at(rng.uniform(0, 30), lambda: start("thinker", think))
        for number in range(NODES):
            name = f"node-{number}"
            cluster.at(rng.uniform(0, 30), lambda name=name: start(name, lambda name=name: node(name)))
        cluster.run(limit_s=12 * 3600)
        assert set(notes["dealt with"]) == set(range(TASKS))
        # A request that took effect after its Thinker had died, and the next had looked, waits for yet another. One that
        # took effect a second time, after its result was dealt with, is not run again; recover() would show its result again.
        late = {parse_request(event.key).task_id for event in cluster.log if "/requests/" in event.key and event.outcome == "done late"}
        left = {parse_request(key).task_id for key in cluster.store.list(f"{QUEUE}requests/")}
        assert not left & acknowledged - late
        return cluster


def test_every_task_has_one_result_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        cluster = simulate(seed, LeasedWork, monkeypatch)
        happened.update(event.what for event in cluster.log)
        happened.update(event.outcome for event in cluster.log if event.what == "put_if_absent")
    for what in ("kill", "pause", "outage", "answer lost", "refused", "exists"):
        assert happened[what] > 3, f"{what!r} came up {happened[what]} times: the seeds no longer try it"


def test_a_planted_bug_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"has changed|is gone"):
        _ = [simulate(seed, Overwriting, monkeypatch) for seed in range(20)]


def test_a_seed_gives_the_same_log_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate(3, LeasedWork, monkeypatch).trace() == simulate(3, LeasedWork, monkeypatch).trace()


def test_the_added_latency_of_a_task_on_a_quick_store_is_below_two_polls() -> None:
    poll_s, added_s = 0.5, []

    def nothing() -> None: ...

    with SimulatedCluster(0, conditions=Conditions(latency_s=(1e-4, 1e-3))) as cluster:

        def queues(who: str) -> MailboxQueues:
            return MailboxQueues(cluster.retrying(), name="campaign", poll_interval=poll_s, clock=cluster.clock, rng=cluster.rng(who))

        def think() -> None:
            mine = queues("thinker")
            for _ in range(20):
                cluster.clock.sleep(1.3)  # out of step with the polls
                began = cluster.clock.monotonic()
                mine.send_inputs(method="nothing")
                mine.get_result()
                added_s.append(cluster.clock.monotonic() - began)
            mine.send_kill_signal()

        cluster.process("node", lambda: MailboxTaskServer([nothing], queues("node"), learner_id="node", isolation="thread").run())
        cluster.process("thinker", think)
        cluster.run(limit_s=3600)
    assert max(added_s) <= 2 * poll_s + 0.01
    assert sum(added_s) > 0
