"""The Shared Queue on machines that die, stall and restart, over a store that answers late, twice or not at all."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from gradientmail_torch.patterns.leased_work import Claim, LeasedWork, Outcome
from gradientmail_torch.patterns.queue import SharedQueue
from gradientmail_torch.testing import Conditions, Process, SimulatedCluster
from gradientmail_torch.testing.simulation import Event

NODES = 4
ITEMS = 25
LEASE_S = 30.0
SEEDS = 40


class Forgetful(LeasedWork):
    """A planted bug: it takes what is already claimed for new."""

    def claim_new(self, item: str) -> Claim | None:
        return self._create(item, 1) or Claim(item=item, attempt=1, nonce="0" * 16)


class Overwriting(LeasedWork):
    """A planted bug: a zombie's outcome replaces the one that stands."""

    def _settle(self, outcome: Outcome) -> Outcome:
        self._mailbox.delete(self._keys.outcome(outcome.item))
        return super()._settle(outcome)


def simulate(seed: int, work: type[LeasedWork], monkeypatch: pytest.MonkeyPatch) -> SimulatedCluster:
    """Four nodes that take items of different length, and trouble. Checks the invariants while it runs."""
    monkeypatch.setattr("gradientmail_torch.patterns.queue.LeasedWork", work)
    rng = random.Random(seed)
    begun: Counter[tuple[object, int]] = Counter()
    with SimulatedCluster(seed, conditions=Conditions.from_rng(rng)) as cluster:

        def node(learner_id: str) -> None:
            own = cluster.rng(f"{learner_id} {len(cluster.processes)}")
            queue = SharedQueue(
                "q", cluster.retrying(), learner_id, lease=LEASE_S, poll_interval=2.0, max_attempts=50, clock=cluster.clock, rng=own
            )
            queue.fill(range(ITEMS), seed=seed)
            with contextlib.closing(queue.tasks()) as tasks:
                for task in tasks:
                    begun[task.value, task.attempt] += 1
                    assert begun[task.value, task.attempt] == 1, f"{task} was handed out twice under one attempt"
                    cluster.clock.sleep(own.choice((0.1, 5.0, 2 * LEASE_S)))
            done = queue.progress()
            assert (done.done, done.left, done.failed) == (ITEMS, 0, 0), done

        committed: dict[str, bytes] = {}

        def outcomes_stay(event: Event) -> None:
            for key in cluster.store.list("queues/q/outcomes/"):
                found = cluster.store.get(key)
                assert found is not None
                assert committed.setdefault(key, found) == found, f"{key} has changed"

        def start(learner_id: str) -> None:
            process = cluster.process(learner_id, lambda: node(learner_id))
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

        cluster.observe(outcomes_stay)
        for number in range(NODES):
            cluster.at(rng.uniform(0, 30), lambda learner_id=f"node-{number}": start(learner_id))
        cluster.run(limit_s=6 * 3600)
        assert {item for item, _ in begun} == set(range(ITEMS))
        return cluster


def test_every_item_is_done_once_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        cluster = simulate(seed, LeasedWork, monkeypatch)
        happened.update(event.what for event in cluster.log)
        happened.update(event.outcome for event in cluster.log if event.what == "put_if_absent")
    for what in ("kill", "pause", "outage", "answer lost", "refused", "exists"):
        assert happened[what] > 10, f"{what!r} came up {happened[what]} times: the seeds no longer try it"


@pytest.mark.parametrize(("bug", "caught_by"), [(Forgetful, "handed out twice"), (Overwriting, "has changed")])
def test_a_planted_bug_is_caught(bug: type[LeasedWork], caught_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=caught_by):
        _ = [simulate(seed, bug, monkeypatch) for seed in range(20)]


def test_a_node_that_beats_keeps_its_item_however_long_it_takes() -> None:
    with SimulatedCluster(0) as cluster:

        def node(learner_id: str, seconds: float) -> list[tuple[object, int]]:
            rng = cluster.rng(learner_id)
            queue = SharedQueue("q", cluster.retrying(), learner_id, lease=LEASE_S, poll_interval=2.0, clock=cluster.clock, rng=rng)
            queue.fill(["x"])
            took = []
            for task in queue.tasks():
                took.append((task.value, task.attempt))
                cluster.clock.sleep(seconds)
            return took

        slow = cluster.process("slow", lambda: node("slow", 20 * LEASE_S))
        quick = cluster.process("quick", lambda: node("quick", 1.0), delay_s=5.0)
        cluster.run(limit_s=3600)
    assert (slow.value, quick.value) == ([("x", 1)], [])


def test_a_node_that_stops_on_notice_hands_its_item_over_within_two_looks() -> None:
    with SimulatedCluster(0) as cluster:
        taken_at: list[float] = []

        def leaving() -> None:
            rng = cluster.rng("leaving")
            queue = SharedQueue("q", cluster.retrying(), "leaving", lease=LEASE_S, poll_interval=2.0, clock=cluster.clock, rng=rng)
            queue.fill(["x"])
            for _ in queue:
                cluster.clock.sleep(10.0)
                break

        def staying() -> None:
            rng = cluster.rng("staying")
            queue = SharedQueue("q", cluster.retrying(), "staying", lease=LEASE_S, poll_interval=2.0, clock=cluster.clock, rng=rng)
            taken_at.extend(cluster.now_s for _ in queue)

        cluster.process("leaving", leaving)
        cluster.process("staying", staying, delay_s=3.0)
        cluster.run(limit_s=3600)
    assert 10.0 <= taken_at[0] <= 10.0 + 2 * 2.0 + 1.0
