"""The simulated cluster: time, threads, processes, faults, and that a seed decides everything."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest

from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.testing import Conditions, Crash, Process, SimulatedCluster, SimulationError, kernel

LOSES_ANSWERS = Conditions(lost_share=1.0)
REFUSES = Conditions(refused_share=1.0)
IS_LATE = Conditions(late_share=1.0)


@pytest.fixture
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster(0) as cluster:
        yield cluster


class TestTime:
    def test_hours_pass_at_once_and_in_order(self, cluster: SimulatedCluster) -> None:
        woke: list[tuple[str, int]] = []

        def sleeper(name: str, hours: float) -> None:
            began = cluster.clock.monotonic()
            cluster.clock.sleep(hours * 3600)
            woke.append((name, round((cluster.clock.monotonic() - began) / 3600)))

        for name, hours in (("late", 9), ("early", 2), ("middle", 5)):
            cluster.process(name, lambda name=name, hours=hours: sleeper(name, hours))
        cluster.run()
        assert woke == [("early", 2), ("middle", 5), ("late", 9)]
        assert 9 * 3600 <= cluster.now_s < 9 * 3600 + 1

    def test_no_two_machines_share_a_clock(self, cluster: SimulatedCluster) -> None:
        def read() -> tuple[float, float]:
            before = cluster.clock.monotonic(), cluster.clock.wall()
            cluster.clock.sleep(10)
            after = cluster.clock.monotonic(), cluster.clock.wall()
            assert all(10 <= b - a < 10.1 for a, b in zip(before, after, strict=True))
            return before

        nodes = [cluster.process(f"{number}", read) for number in range(10)]
        cluster.run()
        origins, walls = zip(*(node.value for node in nodes), strict=True)
        assert max(walls) - min(walls) > 3600
        assert max(origins) - min(origins) > 3600

    def test_it_may_be_run_for_a_while(self, cluster: SimulatedCluster) -> None:
        node = cluster.process("a", lambda: cluster.clock.sleep(100))
        assert not cluster.advance(60)
        assert node.alive
        assert cluster.now_s == 60
        assert cluster.advance(60)
        assert not node.alive


class TestThreads:
    def test_a_wait_ends_by_its_event_or_by_its_timeout(self, cluster: SimulatedCluster) -> None:
        def main() -> list[object]:
            event = threading.Event()

            def setter() -> None:
                cluster.clock.sleep(5)
                event.set()

            began = cluster.clock.monotonic()
            task = cluster.clock.spawn(setter, name="setter")
            found: list[object] = [cluster.clock.wait(event, 2), cluster.clock.wait(event, 60), round(cluster.clock.monotonic() - began)]
            found += [cluster.clock.wait(event), task.join(), task.join(0)]
            return found

        node = cluster.process("a", main)
        cluster.run()
        assert node.value == [False, True, 5, True, True, True]

    def test_a_join_may_run_out(self, cluster: SimulatedCluster) -> None:
        def main() -> bool:
            return cluster.clock.spawn(lambda: cluster.clock.sleep(50), name="long").join(10)

        node = cluster.process("a", main)
        cluster.run()
        assert node.value is False
        assert node.left_running == ["long"]
        assert cluster.now_s < 20

    def test_exactly_one_runs_and_others_come_between_only_where_it_waits(self, cluster: SimulatedCluster) -> None:
        steps: list[str] = []

        def main(name: str) -> None:
            for _ in range(50):
                steps.append(name)
                sum(range(2000))
                steps.append(name)
                cluster.clock.sleep(0)

        for name in "abc":
            cluster.process(name, lambda name=name: main(name))
        cluster.run()
        pairs = list(zip(steps[::2], steps[1::2], strict=True))
        assert all(first == second for first, second in pairs)
        assert sum(one != two for one, two in pairwise(pairs)) > 50

    def test_what_a_thread_raises_ends_the_run_with_the_seed_and_the_log(self) -> None:
        def main() -> None:
            cluster.mailbox.put("a/b", b"x")
            cluster.clock.spawn(lambda: print(1 / 0), name="worker").join()

        with SimulatedCluster(17) as cluster:
            cluster.process("node", main)
            with pytest.raises(ZeroDivisionError) as caught:
                cluster.run()
        assert "seed 17" in caught.value.__notes__[0]
        assert "put            a/b -> done" in caught.value.__notes__[0]

    def test_what_a_process_raises_ends_the_run(self, cluster: SimulatedCluster) -> None:
        cluster.process("a", lambda: print(1 / 0))
        cluster.process("b", lambda: cluster.clock.sleep(1e6))
        with pytest.raises(ZeroDivisionError):
            cluster.run()

    def test_nothing_waits_outside_of_a_process(self, cluster: SimulatedCluster) -> None:
        outside: list[Callable[[], object]] = [
            lambda: cluster.clock.sleep(1),
            lambda: cluster.clock.wait(threading.Event()),
            lambda: cluster.clock.spawn(print, name="x"),
        ]
        for operation in outside:
            with pytest.raises(SimulationError, match="outside of a simulated process"):
                operation()


class TestEnds:
    def test_a_deadlock_is_found_and_described(self, cluster: SimulatedCluster) -> None:
        cluster.process("node", lambda: cluster.clock.wait(threading.Event()))
        with pytest.raises(SimulationError, match=r"nothing can run any more.*\nnode#0/main waits for an event without end"):
            cluster.run()

    def test_a_run_that_does_not_end_says_who_waits_for_what(self, cluster: SimulatedCluster) -> None:
        def forever() -> None:
            while True:
                cluster.clock.sleep(7)

        cluster.process("node", forever)
        with pytest.raises(SimulationError, match=r"not at its end after 100 simulated seconds\nnode#0/main waits for a sleep until 10\d"):
            cluster.run(limit_s=100)

    def test_a_wait_outside_of_the_simulation_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernel, "STALL_S", 0.2)
        outside = threading.Event()
        cluster = SimulatedCluster(0)
        cluster.process("node", outside.wait)
        try:
            with pytest.raises(SimulationError, match=r"(?s)node#0/main has kept the baton.*outside of the simulation.*in wait"):
                cluster.run()
        finally:
            outside.set()

    def test_leaving_the_context_ends_what_runs(self) -> None:
        cleaned = []

        def main() -> None:
            try:
                cluster.clock.spawn(lambda: cluster.clock.sleep(1e9), name="worker")
                cluster.clock.sleep(1e9)
            finally:
                cleaned.append(cluster.now_s)

        with SimulatedCluster(0) as cluster:
            cluster.process("a", main)
            cluster.process("never-begun", main, delay_s=1e9)
            cluster.advance(10)
        assert cleaned == [10]


class TestKill:
    def test_a_killed_process_has_no_further_effect(self, cluster: SimulatedCluster) -> None:
        ran = []

        def worker() -> None:
            while True:
                cluster.clock.sleep(1)
                ran.append(cluster.now_s)

        def main() -> None:
            cluster.clock.spawn(worker, name="worker")
            cluster.mailbox.put("before", b"")
            try:
                cluster.clock.sleep(1e6)
            finally:
                cluster.mailbox.put("after", b"")

        node = cluster.process("a", main)
        cluster.at(10, lambda: cluster.kill(node))
        cluster.run()
        assert [*cluster.store.list("")] == ["before"]
        assert 8 <= len(ran) <= 10
        assert max(ran) <= 10
        assert (node.alive, node.error) == (False, None)

    def test_a_process_may_kill_itself_or_crash(self, cluster: SimulatedCluster) -> None:
        def crash() -> None:
            raise Crash

        def crash_in_a_thread() -> None:
            cluster.clock.spawn(crash, name="worker")
            cluster.clock.sleep(100)
            cluster.mailbox.put("survived", b"")

        def kill_itself() -> None:
            cluster.kill(nodes[-1])
            cluster.mailbox.put("survived", b"")

        nodes: list[Process] = [cluster.process("a", crash), cluster.process("b", crash_in_a_thread)]
        nodes.append(cluster.process("c", kill_itself))
        cluster.run()
        assert [*cluster.store.list("")] == []
        assert not any(node.alive for node in nodes)
        assert cluster.now_s < 50

    def test_a_restart_is_another_process_with_memory_of_its_own(self, cluster: SimulatedCluster) -> None:
        seen = []

        def main() -> None:
            seen.append((repr(cluster.mailbox), cluster.mailbox.put_if_absent("once", b"")))
            cluster.clock.sleep(100)

        node = cluster.process("a", main)
        cluster.at(50, lambda: cluster.kill(node))
        cluster.at(60, lambda: cluster.process("a", main))
        cluster.run()
        assert seen == [("simulated://a#0", True), ("simulated://a#1", False)]

    def test_a_request_that_was_wholly_sent_may_outlive_its_process(self) -> None:
        def written(seed: int, up_bytes_per_s: float) -> bool:
            with SimulatedCluster(seed, conditions=Conditions(latency_s=(10, 10))) as cluster:
                node = cluster.process("a", lambda: cluster.mailbox.put("a", bytes(1000)), up_bytes_per_s=up_bytes_per_s)
                cluster.at(5, lambda: cluster.kill(node))
                cluster.at(30, lambda: None)
                cluster.run()
                return cluster.store.get("a") is not None

        assert {written(seed, 1e9) for seed in range(20)} == {True, False}
        assert {written(seed, 100) for seed in range(20)} == {False}


class TestPause:
    def test_a_paused_process_stands_still_and_wakes_as_it_was(self, cluster: SimulatedCluster) -> None:
        def main() -> list[int]:
            times = []
            for _ in range(5):
                cluster.clock.sleep(1)
                times.append(round(cluster.now_s))
            return times

        nodes = [cluster.process("a", main), cluster.process("b", main)]
        cluster.at(2.2, lambda: cluster.pause(nodes[0], 100))
        cluster.run()
        assert nodes[0].value == [1, 2, 102, 103, 104]
        assert nodes[1].value == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize(("clock_stops", "passed"), [(False, 95), (True, 10)])
    def test_its_clock_goes_on_or_stands_still(self, cluster: SimulatedCluster, clock_stops: bool, passed: int) -> None:
        def main() -> int:
            began = cluster.clock.monotonic()
            cluster.clock.sleep(10)
            return round(cluster.clock.monotonic() - began)

        node = cluster.process("a", main)
        cluster.at(5, lambda: cluster.pause(node, 90, clock_stops=clock_stops))
        cluster.run()
        assert node.value == passed

    def test_what_it_was_sending_is_sent_on_when_it_wakes(self) -> None:
        with SimulatedCluster(0) as cluster:
            node = cluster.process("a", lambda: cluster.mailbox.put("a", bytes(1000)), up_bytes_per_s=100)
            cluster.at(5, lambda: cluster.pause(node, 60))
            cluster.advance(60)
            assert cluster.store.get("a") is None
            cluster.run()
            assert cluster.store.get("a") == bytes(1000)
            assert 65 < cluster.now_s < 75

    def test_it_may_be_killed_while_it_stands_still(self, cluster: SimulatedCluster) -> None:
        node = cluster.process("a", lambda: cluster.clock.sleep(10))
        cluster.at(5, lambda: cluster.pause(node, 1e6))
        cluster.at(6, lambda: cluster.kill(node))
        cluster.run()
        assert cluster.now_s < 10


class TestNetwork:
    def test_of_two_that_create_at_once_one_wins_and_a_seed_decides_who(self) -> None:
        def winner(seed: int) -> str:
            with SimulatedCluster(seed) as cluster:
                nodes = [cluster.process(name, lambda: cluster.mailbox.put_if_absent("a", b"")) for name in "ab"]
                cluster.run()
                (won,) = (node.name for node in nodes if node.value)
                return won

        assert {winner(seed) for seed in range(20)} == {"a", "b"}

    def test_a_request_takes_effect_at_a_moment_before_its_answer(self) -> None:
        with SimulatedCluster(0, conditions=Conditions(latency_s=(10, 10))) as cluster:
            took_effect = []
            cluster.observe(lambda event: took_effect.append(event.at_s))
            cluster.process("a", lambda: [cluster.mailbox.put("a", b"") for _ in range(50)])
            cluster.run()
        waits = [at - 10 * number for number, at in enumerate(took_effect)]
        assert all(0 <= wait <= 10.1 for wait in waits)
        assert min(waits) < 2
        assert max(waits) > 8

    @pytest.mark.parametrize(
        ("conditions", "said", "there"), [(LOSES_ANSWERS, "answer lost", True), (REFUSES, "refused", False), (IS_LATE, "no answer", False)]
    )
    def test_faults_do_what_they_say(self, conditions: Conditions, said: str, there: bool) -> None:
        def main() -> None:
            with pytest.raises(MailboxUnavailable, match=said):
                cluster.mailbox.put_if_absent("a", b"x")
            assert (cluster.store.get("a") is not None) == there

        with SimulatedCluster(0, conditions=conditions) as cluster:
            cluster.process("a", main)
            cluster.at(60, lambda: None)
            cluster.run()
            assert (cluster.store.get("a") is not None) == (said != "refused")

    def test_an_outage_is_everyones_or_one_processs(self) -> None:
        def main() -> list[bool]:
            answered = []
            for _ in range(30):
                try:
                    cluster.mailbox.get("a")
                    answered.append(True)
                except MailboxUnavailable:
                    answered.append(False)
                cluster.clock.sleep(1 - (cluster.now_s % 1))
            return answered

        with SimulatedCluster(0, conditions=Conditions(latency_s=(0.1, 0.2))) as cluster:
            nodes = [cluster.process("a", main), cluster.process("b", main)]
            cluster.at(4.9, lambda: cluster.outage(5, nodes[0]))
            cluster.at(19.9, lambda: cluster.outage(3))
            cluster.run()
        answered_a, answered_b = (node.value for node in nodes)
        assert answered_a == [True] * 5 + [False] * 5 + [True] * 10 + [False] * 3 + [True] * 7
        assert answered_b == [True] * 20 + [False] * 3 + [True] * 7

    def test_a_listing_is_read_page_by_page(self) -> None:
        def main() -> list[str]:
            return [*cluster.mailbox.list("a/")]

        with SimulatedCluster(0, conditions=Conditions(page_keys=2, latency_s=(1, 1))) as cluster:
            for key in ("a/2", "a/4", "a/6", "b"):
                cluster.mailbox.put(key, b"")
            node = cluster.process("a", main)
            cluster.at(1.0, lambda: (cluster.store.put("a/1", b""), cluster.store.put("a/5", b"")))
            cluster.run()
        assert node.value == ["a/2", "a/4", "a/5", "a/6"]

    def test_bytes_take_their_time(self) -> None:
        with SimulatedCluster(0, conditions=Conditions(down_bytes_per_s=50)) as cluster:
            cluster.process("a", lambda: (cluster.mailbox.put("a", bytes(1000)), cluster.mailbox.get("a")), up_bytes_per_s=100)
            cluster.run()
            assert 30 <= cluster.now_s < 31

    def test_outside_of_processes_the_mailbox_is_the_store(self, cluster: SimulatedCluster) -> None:
        cluster.mailbox.put("a", b"x")
        assert cluster.store.get("a") == b"x"
        assert cluster.requests == 0

    def test_retries_wait_on_virtual_time_and_stay_honest(self) -> None:
        def main(name: str) -> int:
            return sum(cluster.retrying(patience_s=1e6).put_if_absent(f"{number}", name.encode()) for number in range(50))

        with SimulatedCluster(1, conditions=Conditions(refused_share=0.5, lost_share=0.3)) as cluster:
            nodes = [cluster.process(name, lambda name=name: main(name)) for name in "abc"]
            cluster.run()
            assert sum(node.value for node in nodes) == 50


class TestObservers:
    def test_an_observer_sees_each_effect_with_the_store_as_it_then_is(self, cluster: SimulatedCluster) -> None:
        seen = []
        cluster.observe(lambda event: seen.append((event.process, event.what, event.key, event.outcome, len([*cluster.store.list("")]))))
        cluster.process("a", lambda: (cluster.mailbox.put_if_absent("x", b""), cluster.mailbox.get("x"), cluster.mailbox.delete("x")))
        cluster.run()
        assert seen == [("a#0", "put_if_absent", "x", "created", 1), ("a#0", "get", "x", "0 B", 1), ("a#0", "delete", "x", "done", 0)]
        assert cluster.requests == 3

    def test_what_it_raises_ends_the_run(self, cluster: SimulatedCluster) -> None:
        def no_y(event: object) -> None:
            assert cluster.store.get("y") is None, "invariant: there is no y"

        cluster.observe(no_y)
        cluster.process("a", lambda: [cluster.mailbox.put(key, b"") for key in "xyz"])
        with pytest.raises(AssertionError, match="there is no y"):
            cluster.run()
        assert [*cluster.store.list("")] == ["x", "y"]

    def test_the_log_may_be_bounded(self) -> None:
        with SimulatedCluster(0, log_events=3) as cluster:
            cluster.process("a", lambda: [cluster.mailbox.put(key, b"") for key in "xyz"])
            cluster.run()
            assert [event.key for event in cluster.log] == ["y", "z", ""]


def everything(seed: int) -> str:
    """A run in which a bit of everything happens, as its log."""
    rng = random.Random(seed)
    with SimulatedCluster(seed, conditions=Conditions.from_rng(rng)) as cluster:

        def worker(stop: threading.Event) -> None:
            while not cluster.clock.wait(stop, 2):
                cluster.retrying(patience_s=1e6).put(f"beats/{uuid4().hex}/{secrets.token_hex(2)}", b"x")

        def main(name: str) -> None:
            stop = threading.Event()
            task = cluster.clock.spawn(lambda: worker(stop), name="worker")
            for number in range(10):
                cluster.retrying(patience_s=1e6).put_if_absent(f"shared/{number}", name.encode())
                assert len([*cluster.retrying(patience_s=1e6).list("shared/")]) >= number
            stop.set()
            task.join()

        nodes = [cluster.process(name, lambda name=name: main(name), up_bytes_per_s=1000) for name in "abcd"]
        cluster.at(rng.uniform(0, 5), lambda: cluster.kill(nodes[0]))
        cluster.at(rng.uniform(0, 5), lambda: cluster.pause(nodes[1], rng.uniform(0, 100)))
        cluster.at(rng.uniform(0, 5), lambda: cluster.outage(rng.uniform(0, 20), nodes[2]))
        cluster.at(rng.uniform(5, 9), lambda: cluster.process("a", lambda: main("a")))
        cluster.run()
        return cluster.trace()


class TestSeeds:
    def test_one_seed_gives_one_log_and_another_gives_another(self) -> None:
        logs = [everything(seed) for seed in range(30)]
        assert logs == [everything(seed) for seed in range(30)]
        assert len(set(logs)) == 30
        for what in ("answer lost", "refused", "no answer", " late", "away", "kill", "pause", "exists", "created"):
            assert any(what in log for log in logs), f"no seed of thirty has {what!r}"

    def test_another_interpreter_gives_the_same(self) -> None:
        program = "import importlib.util, sys; s = importlib.util.spec_from_file_location('t', sys.argv[1]);"
        program += "m = importlib.util.module_from_spec(s); s.loader.exec_module(m); sys.stdout.write(m.everything(5))"
        root = str(Path(__file__).parents[2])
        logs = {
            subprocess.run(
                [sys.executable, "-c", program, __file__],
                env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": hash_seed},
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            for hash_seed in ("1", "2")
        }
        assert logs == {everything(5)}

    def test_only_simulated_threads_draw_from_the_seed(self) -> None:
        def drawn(seed: int) -> object:
            with SimulatedCluster(seed) as cluster:
                node = cluster.process("a", lambda: (uuid4(), secrets.token_hex(), os.urandom(4)))
                cluster.run()
                return node.value

        system = os.urandom
        assert drawn(1) == drawn(1) != drawn(2)
        assert os.urandom is system
        assert uuid4() != uuid4()
