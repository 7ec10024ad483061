"""The Barrier on machines that die, stall and restart, over a store that answers late, twice or not at all."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.testing import Conditions, SimulatedCluster
from gradientmail_torch.testing.simulation import Event

PARTIES = 4
SEEDS = 200


class Hasty(Barrier):
    """A planted bug: it passes one arrival too early."""

    def _wait(self, name: str, parties: int, timeout: float | None) -> list[str]:
        return super()._wait(name, parties - 1, timeout)


class Forgetful(Barrier):
    """A planted bug: it takes its arrival back."""

    def _wait(self, name: str, parties: int, timeout: float | None) -> list[str]:
        found = super()._wait(name, parties, timeout)
        self._mailbox.delete(f"barriers/{name}/{self._learner_id}")
        return found


def simulate(seed: int, barrier: type[Barrier] = Barrier, *, names: int = 2) -> SimulatedCluster:
    """Five nodes, two barriers of four, and trouble. Checks the invariants while it runs."""
    rng = random.Random(seed)
    passed: Counter[str] = Counter()
    with SimulatedCluster(seed, conditions=Conditions.from_rng(rng)) as cluster:

        def arrivals(name: str) -> set[str]:
            return {key.rpartition("/")[2] for key in cluster.store.list(f"barriers/{name}/")}

        def node(learner_id: str) -> None:
            point = barrier(cluster.retrying(), learner_id, poll_interval=rng.choice((0.5, 2.0)), clock=cluster.clock)
            for number in range(names):
                name = f"epoch-{number}"
                found = point.wait(name, parties=PARTIES)
                assert len(arrivals(name)) >= PARTIES, f"{learner_id} passed {name} with only {arrivals(name)} there"
                assert PARTIES <= len(found) == len(set(found))
                assert found == sorted(found)
                assert learner_id in found
                assert set(found) <= arrivals(name), f"{learner_id} was told of {found}, but {arrivals(name)} are there"
                passed[name] += 1

        known: set[str] = set()

        def arrivals_stay(event: Event) -> None:
            nonlocal known
            now = set(cluster.store.list("barriers/"))
            assert known <= now, f"an arrival is gone: {known - now}"
            known = now

        def start(learner_id: str) -> None:
            process = cluster.process(learner_id, lambda: node(learner_id))
            trouble = rng.random()
            if trouble < 0.3:
                cluster.at(rng.expovariate(1 / 10), lambda: die(process, learner_id))
            elif trouble < 0.5:
                cluster.at(
                    rng.expovariate(1 / 10),
                    lambda: cluster.pause(process, rng.uniform(1, rng.choice((10, 100, 1000))), clock_stops=rng.random() < 0.5),
                )
            elif trouble < 0.6:
                cluster.at(rng.expovariate(1 / 10), lambda: cluster.outage(rng.uniform(1, 200), process))

        def die(process: object, learner_id: str) -> None:
            cluster.kill(process)  # type: ignore[arg-type]
            cluster.at(rng.uniform(0, 60), lambda: start(learner_id))

        cluster.observe(arrivals_stay)
        for number in range(PARTIES + 1):
            cluster.at(rng.uniform(0, 60), lambda learner_id=f"node-{number}": start(learner_id))
        if rng.random() < 0.2:
            cluster.at(rng.uniform(0, 60), lambda: cluster.outage(rng.uniform(1, 120)))
        cluster.run(limit_s=3 * 3600)
        # Each that did not die in between has passed; the last life of each has, in any case.
        assert all(count >= PARTIES + 1 for count in passed.values()), passed
        assert len(passed) == names
        return cluster


def test_nobody_passes_early_and_all_pass_in_the_end() -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        cluster = simulate(seed)
        happened.update(event.what for event in cluster.log)
        happened.update(event.outcome for event in cluster.log if event.what == "put_if_absent")
    for what in ("kill", "pause", "outage", "answer lost", "refused", "exists"):
        assert happened[what] > 10, f"{what!r} came up {happened[what]} times: the seeds no longer try it"


def test_a_machine_that_slept_does_not_take_its_sleep_for_an_outage() -> None:
    with SimulatedCluster(0) as cluster:
        node = cluster.process("a", lambda: Barrier(cluster.mailbox, "a", clock=cluster.clock).wait("start", parties=2))
        cluster.at(10, lambda: cluster.pause(node, 3600))
        cluster.at(3605, lambda: cluster.outage(60, node))
        cluster.at(3700, lambda: cluster.process("b", lambda: Barrier(cluster.mailbox, "b", clock=cluster.clock).wait("start", parties=2)))
        cluster.run(limit_s=3710)
    assert node.value == ["a", "b"]


@pytest.mark.parametrize(("bug", "caught_by"), [(Hasty, "passed epoch-"), (Forgetful, "an arrival is gone")])
def test_a_planted_bug_is_caught(bug: type[Barrier], caught_by: str) -> None:
    with pytest.raises(AssertionError, match=caught_by) as caught:
        _ = [simulate(seed, bug) for seed in range(20)]
    assert "the end of the log:" in caught.value.__notes__[0]
