"""Steering over a mailbox whose nodes and Thinkers die, and whose answers are lost: one result for every task."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mailbox_nodes import QUICK, Node, objects, results_of, runs, serve_one, server_end, until

from gradientmail_torch.errors import MailboxUnavailable, WorkFenced
from gradientmail_torch.keys import TaskKeys
from gradientmail_torch.mailbox import RetryingMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.steering import MailboxQueues
from gradientmail_torch.testing.faults import Choice, Crash, CrashAfter, CrashBefore, Interposed, LostAnswers, Outage

# --- nodes that die ---------------------------------------------------------------------------------------


def test_a_child_that_is_killed_is_a_result_and_its_node_goes_on(folder: str, node: Node) -> None:
    queues = MailboxQueues(folder, **QUICK)
    node(queues)
    queues.send_inputs(method="crash")
    queues.send_inputs(2, method="f")
    results = {result.method: result for result in results_of(queues, 2)}
    assert "SIGKILL" in results["crash"].failure_info.exception
    assert results["f"].value == 1


def test_a_node_that_is_killed_has_its_task_taken_over_and_there_is_one_result(shared_url: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(shared_url, **QUICK)
    first = node(queues, "first")
    task_id = queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    child = int((tmp_path / "began").read_text())
    first.kill()
    node(queues, "second")
    until(lambda: int((tmp_path / "began").read_text()) != child)
    (tmp_path / "go").touch()
    result = queues.get_result(timeout=60)
    assert (result.task_id, result.success, result.worker_info.server, result.worker_info.attempt) == (task_id, True, "second", 2)
    assert not runs(child)
    assert len(objects(shared_url, "results/")) == 1
    with pytest.raises(TimeoutError):
        queues.get_result(timeout=0.1)


def test_a_node_that_is_busy_watches_too_and_takes_a_dead_nodes_task_before_newer_ones(mailbox: MemoryMailbox) -> None:
    mortal = Outage(mailbox)
    settings = {"poll_interval": 0.01, "lease": 0.3}
    queues = MailboxQueues(mailbox, **settings)
    held = queues.send_inputs("held", method="same")
    with server_end(MailboxQueues(mortal, **settings)) as dead, server_end(MailboxQueues(mailbox, **settings)) as busy:
        assert dead.get_task(timeout=10)[1].task_id == held
        with pytest.raises(TimeoutError):
            busy.get_task(timeout=0.02)
        for number in range(3):
            queues.send_inputs(number, method="same")
        busy.get_task(timeout=10)
        mortal.down = True
        (contended,) = busy._server._contended
        until(lambda: busy.tend() or busy._server._work.is_free(contended))
        task = busy.get_task(timeout=10)[1]
        assert (task.task_id, task.worker_info.attempt) == (held, 2)


def test_a_task_that_kills_every_node_comes_to_an_end(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, max_attempts=2, **QUICK)
    queues.send_inputs(str(tmp_path / "pid"), method="kill_server")
    for number in range(2):
        server = node(queues, f"node-{number}")
        (tmp_path / "scratch").write_text(str(server.pid))
        (tmp_path / "scratch").replace(tmp_path / "pid")
        server.join(60)
        (tmp_path / "pid").unlink()
    node(queues, "last")
    assert "2 task servers took this task" in queues.get_result(timeout=60).failure_info.exception


def test_a_node_that_slept_through_its_lease_finds_its_result_refused(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, **QUICK)
    sleeper = node(queues, "sleeper")
    queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    os.kill(sleeper.pid, signal.SIGSTOP)
    child = int((tmp_path / "began").read_text())
    node(queues, "second")
    until(lambda: int((tmp_path / "began").read_text()) != child)
    (tmp_path / "go").touch()  # both end
    result = queues.get_result(timeout=60)
    os.kill(sleeper.pid, signal.SIGCONT)
    assert result.worker_info.server == "second"
    queues.send_inputs(str(tmp_path / "go"), method="wait_for")
    assert queues.get_result(timeout=60).success
    with pytest.raises(TimeoutError):
        queues.get_result(timeout=0.1)
    assert len(objects(folder, "results/")) == 2


def test_a_task_that_another_node_has_taken_over_is_killed(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, **QUICK)
    sleeper = node(queues, "sleeper")
    queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    child = int((tmp_path / "began").read_text())
    os.kill(sleeper.pid, signal.SIGSTOP)
    node(queues, "second")
    until(lambda: int((tmp_path / "began").read_text()) != child)
    os.kill(sleeper.pid, signal.SIGCONT)
    until(lambda: not runs(child))
    (tmp_path / "go").touch()
    assert queues.get_result(timeout=60).worker_info.server == "second"


def test_on_notice_a_node_gives_back_what_it_runs_and_nobody_waits_for_the_lease(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, poll_interval=0.01, lease=600.0)
    first = node(queues, "first")
    queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    first.terminate()
    first.join(60)
    assert first.exitcode == 0
    (tmp_path / "go").touch()
    node(queues, "second")
    assert queues.get_result(timeout=60).worker_info.server == "second"


def test_wall_time_and_retries_hold_on_nodes_too(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, keep_inputs=False, **QUICK)
    node(queues, slots=2)
    (tmp_path / "tries").mkdir()
    queues.send_inputs(str(tmp_path / "never"), method="wait_for", resources={"walltime_s": 0.1})
    queues.send_inputs(1, str(tmp_path / "tries"), method="fail_times", max_retries=1)
    results = {result.method: result for result in results_of(queues, 2)}
    assert "over its wall time" in results["wait_for"].failure_info.exception
    assert (results["fail_times"].value, results["fail_times"].retries) == (2, 1)


# --- every operation may go wrong -------------------------------------------------------------------------


class Mortal(Interposed):
    """Once something has crashed in it, nothing gets through any more: the process is dead, its threads too."""

    dead = False

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], Any]) -> Any:
        if self.dead and threading.current_thread() is threading.main_thread():
            raise Crash("dead")
        if self.dead:
            raise MailboxUnavailable("dead")
        try:
            return carry_out()
        except Crash:
            self.dead = True
            raise


def nth_of_the_main_thread(number: int) -> Choice:
    main = threading.current_thread()
    seen = iter(range(1, 10_000))
    return lambda operation, key: threading.current_thread() is main and next(seen) == number


@pytest.mark.parametrize("fault", [CrashBefore, CrashAfter])
def test_a_server_that_dies_at_any_operation_leaves_one_result(fault: type[CrashBefore]) -> None:
    settings = {"poll_interval": 0.01, "lease": 0.1}
    for number in range(1, 100):
        box = MemoryMailbox()
        queues = MailboxQueues(box, **settings)
        task_id = queues.send_inputs(bytes(50_000), method="same", keep_inputs=False)
        mortal = Mortal(fault(box, nth_of_the_main_thread(number)))
        try:
            with server_end(MailboxQueues(mortal, **settings)) as end:
                serve_one(end)
        except Crash:
            pass
        if not list(box.list(TaskKeys.of("default").results("default"))):
            with server_end(MailboxQueues(box, **settings)) as end:
                serve_one(end)
        result = queues.get_result(timeout=30)
        assert (result.task_id, result.value) == (task_id, bytes(50_000)), number
        assert objects(box, "data/") == []
        assert objects(box, "requests/") == []
        assert len(objects(box, "results/")) == 1
        if not mortal.dead:
            assert number > 6  # all of them have been tried
            return


@pytest.mark.parametrize("fault", [CrashBefore, CrashAfter])
def test_a_thinker_that_dies_at_any_operation_loses_no_task(fault: type[CrashBefore]) -> None:
    settings = {"poll_interval": 0.01, "lease": 60.0}
    for number in range(1, 100):
        box = MemoryMailbox()
        mortal = Mortal(fault(box, nth_of_the_main_thread(number)))
        sent, received = [], []
        try:
            queues = MailboxQueues(mortal, auto_ack=False, **settings)
            for size in (10, 50_000):
                sent.append(queues.send_inputs(bytes(size), method="same"))
            with server_end(MailboxQueues(box, **settings)) as end:
                for _ in sent:
                    serve_one(end)
            for _ in sent:
                result = queues.get_result(timeout=30)
                received.append(result.task_id)
                queues.ack(result)
        except Crash:
            pass
        again = MailboxQueues(box, auto_ack=False, **settings)
        left = again.recover()
        assert set(sent) <= {*left, *received}, number
        if any(not again._mailbox.get(again._keys.outcome(item)) for item in again._items.values()):
            with server_end(MailboxQueues(box, **settings)) as end:
                while again.active_count > len(list(box.list(again._keys.results("default")))):
                    serve_one(end)
        for _ in left:
            again.ack(again.get_result(timeout=30))
        assert objects(box, "requests/") == []
        if not mortal.dead:
            assert number > 12
            return


@pytest.mark.parametrize("side", ["Thinker", "server"])
def test_a_lost_answer_of_any_operation_changes_nothing(side: str) -> None:
    settings = {"poll_interval": 0.01, "lease": 60.0}
    for number in range(1, 100):
        box = MemoryMailbox()
        lossy = LostAnswers(box, nth_of_the_main_thread(number))
        patient = RetryingMailbox(lossy, first_wait_s=0.001)
        queues = MailboxQueues(patient if side == "Thinker" else box, **settings)
        queues.send_inputs(bytes(50_000), method="same")
        with server_end(MailboxQueues(patient if side == "server" else box, **settings)) as end:
            serve_one(end)
        result = queues.get_result(timeout=30)
        assert (result.value, result.worker_info.attempt) == (bytes(50_000), 1), number
        with pytest.raises(TimeoutError):
            queues.get_result(timeout=0)
        assert [len(objects(box, part)) for part in ("requests/", "data/", "results/")] == [0, 0, 1]
        if not lossy.fired:
            assert number > 5
            return


def test_a_late_server_is_refused_and_takes_its_values_with_it() -> None:
    box = MemoryMailbox()
    settings = {"poll_interval": 0.01, "lease": 60.0}
    queues = MailboxQueues(box, **settings)
    queues.send_inputs(1, method="same")
    with server_end(MailboxQueues(box, **settings)) as late, server_end(MailboxQueues(box, **settings)) as second:
        _, task = late.get_task(timeout=10)
        late._server._work.release(late._server._held[task.task_id])
        until(lambda: any(True for _ in box.list(TaskKeys.of("default").beats())))
        serve_one(second)
        task.set_result(bytes(50_000))
        with pytest.raises(WorkFenced):
            late.send_result(task)
        assert objects(box, "data/") == []
    assert queues.get_result(timeout=10).value == 1
