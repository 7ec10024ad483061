"""Steering over a mailbox: nodes come and go, and every task has exactly one result."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steering_tasks import (
    count_up,
    crash,
    echo,
    f,
    fail,
    fail_times,
    kill_server,
    nothing,
    same,
    stream_tensors,
    think_and_die,
    wait_for,
    where,
)

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, KillSignal, MailboxUnavailable, NoTaskServer, WorkFenced
from gradientmail_torch.keys import TaskKeys
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, RetryingMailbox, SignedMailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.steering import BaseThinker, MailboxQueues, MailboxTaskServer, Result, ServerInfo, agent, result_processor
from gradientmail_torch.patterns.steering.methods import execute
from gradientmail_torch.testing.faults import Choice, Crash, CrashAfter, CrashBefore, Interposed, LostAnswers, Outage, Slow

QUICK = {"poll_interval": 0.01, "lease": 1.0}
METHODS = [f, echo, same, fail, crash, nothing, count_up, stream_tensors, where, wait_for, fail_times, kill_server]
Node = Callable[..., MailboxTaskServer]


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        SYSTEM_CLOCK.sleep(0.005)


def runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture
def node(stack: ExitStack, serve: Callable[..., Any]) -> Node:
    """Starts a task server: a process where the mailbox can be reached from one, else a thread."""

    def start(queues: MailboxQueues, name: str = "node-0", **settings: Any) -> MailboxTaskServer:
        server = MailboxTaskServer(METHODS, queues, learner_id=name, **{"watch_interval_s": 0.05} | settings)
        if not isinstance(queues._where, Mailbox) and not str(queues._where).startswith("memory:"):
            return serve(server)
        thread = threading.Thread(target=server.run, name=name)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        until(lambda: any(info.server_id == name for info in queues.servers()))
        return server

    return start


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "mailbox")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def shared_url(request: pytest.FixtureRequest, folder: str) -> str:
    """A mailbox that processes share."""
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else folder


def results_of(queues: MailboxQueues, count: int, topic: str = "default") -> list[Result]:
    return [queues.get_result(topic, timeout=60) for _ in range(count)]


def objects(url: Any, part: str, name: str = "default") -> list[str]:
    return list(open_mailbox(url).list(TaskKeys.of(name).root + part))


# --- on every backend -------------------------------------------------------------------------------------


def test_tasks_run_and_their_results_come_back(mailbox_url: str, node: Node) -> None:
    queues = MailboxQueues(mailbox_url, topics=["a"], **QUICK)
    node(queues)
    sent = [queues.send_inputs(x, method="f", topic="a", task_info={"x": x}) for x in range(5)]
    results = results_of(queues, 5, "a")
    assert sorted(result.task_id for result in results) == sorted(sent)
    assert all(result.value == f(result.task_info["x"]) and result.success and result.complete for result in results)
    assert queues.active_count == 0
    assert objects(mailbox_url, "requests/") == []


def test_a_generator_streams_and_its_results_come_in_order(mailbox_url: str, node: Node) -> None:
    queues = MailboxQueues(mailbox_url, **QUICK)
    node(queues)
    queues.send_inputs(5, method="count_up")
    found = []
    while not found or found[-1].complete is False:
        found.append(queues.get_result(timeout=60))
    assert [result.value for result in found] == [0, 1, 2, 3, 4, 5]
    assert [result.complete for result in found] == [False] * 5 + [True]
    assert len(objects(mailbox_url, "results/")) == 1  # the outcome stays: it is the fence


def test_large_values_are_objects_of_their_own_and_go_when_they_were_received(mailbox_url: str, node: Node) -> None:
    queues = MailboxQueues(mailbox_url, **QUICK)
    node(queues)
    tensor = torch.arange(100_000)
    queues.send_inputs({"x": tensor, "name": "weights"}, method="same")
    result = queues.get_result(timeout=60)
    assert torch.equal(result.value["x"], tensor)
    assert torch.equal(result.args[0]["x"], tensor)
    assert objects(mailbox_url, "data/") == []


# --- one message and the other ----------------------------------------------------------------------------


def test_every_argument_of_send_inputs_arrives(mailbox: MemoryMailbox, node: Node) -> None:
    queues = MailboxQueues(mailbox, topics=["ä/ b."], **QUICK)
    node(queues, isolation="thread")
    task_id = queues.send_inputs(
        "ab",
        method="where",
        input_kwargs={},
        keep_inputs=True,
        resources={"cpu_threads": 2},
        topic="ä/ b.",
        task_info={"info": [1]},
        max_retries=0,
    )
    failed = queues.get_result("ä/ b.", timeout=30)  # where() takes no argument
    assert (failed.task_id, failed.args, failed.task_info, failed.topic) == (task_id, ("ab",), {"info": [1]}, "ä/ b.")
    assert "TypeError" in failed.failure_info.exception
    queues.send_inputs(method="where", resources={"cpu_threads": 2}, topic="ä/ b.", keep_inputs=False)
    result = queues.get_result("ä/ b.", timeout=30)
    assert (result.value["threads"], result.value["attempt"]) == (2, 1)
    assert result.worker_info.server == "node-0"
    assert result.inputs == ((), {})


def test_all_marks_are_made_in_order(mailbox: MemoryMailbox, node: Node) -> None:
    from gradientmail_torch.patterns.steering.result import MARKS

    queues = MailboxQueues(mailbox, **QUICK)
    node(queues)
    queues.send_inputs(method="nothing")
    result = queues.get_result(timeout=30)
    marks = [getattr(result.timestamp, name) for name in MARKS]
    assert None not in marks
    assert marks == sorted(marks)


def test_pickle_over_a_mailbox_is_a_choice_of_both_sides(mailbox: MemoryMailbox, node: Node) -> None:
    careful = MailboxQueues(mailbox, **QUICK)
    with pytest.raises(ConfigError, match="serialization_method='pickle' where everyone who can write to the queue may run code"):
        careful.send_inputs({1, 2}, method="same")
    trusting = MailboxQueues(mailbox, serialization_method="pickle", **QUICK)
    node(careful, "careful", isolation="thread")
    trusting.send_inputs({1, 2}, method="same")
    refused = trusting.get_result(timeout=30)
    assert refused.success is False
    assert "does not take pickled values" in refused.failure_info.exception
    assert "signed with a run key" in refused.failure_info.exception


def test_pickle_works_where_both_sides_have_chosen_it(mailbox: MemoryMailbox, node: Node) -> None:
    queues = MailboxQueues(mailbox, serialization_method="pickle", **QUICK)
    node(queues, isolation="thread")
    queues.send_inputs({1, 2}, method="same")
    assert queues.get_result(timeout=30).value == {1, 2}


def test_in_a_signed_run_pickle_is_the_choice_of_the_sender_alone(mailbox: MemoryMailbox, node: Node) -> None:
    signed = CountingMailbox(SignedMailbox(mailbox, "the key of this run"))
    node(MailboxQueues(signed, **QUICK), isolation="thread")
    sender = MailboxQueues(signed, serialization_method="pickle", **QUICK)
    sender.send_inputs({1, 2}, method="same")
    assert sender.get_result(timeout=30).value == {1, 2}


def test_a_thousand_sends_need_no_reader_and_do_not_slow_the_next_claim(mailbox: MemoryMailbox) -> None:
    box = CountingMailbox(mailbox)
    queues = MailboxQueues(mailbox, **QUICK)
    for number in range(1000):
        queues.send_inputs(number, method="same")
    with server_end(MailboxQueues(box, poll_interval=60.0, lease=600.0)) as end:
        before = Counter(box.usage.requests)
        for _ in range(100):
            _, task = end.get_task(timeout=10)
            task.set_result(None)
            end.send_result(task)
        spent = Counter(box.usage.requests) - before
    assert spent == {"put": 200, "get": 101, "list": 1}  # 1,000 keys are one page


def test_a_task_takes_at_most_eight_requests_over_its_life(s3_url: str, node: Node, stack: ExitStack) -> None:
    box = CountingMailbox(open_mailbox(s3_url))
    queues = MailboxQueues(box, poll_interval=0.1, lease=60)
    server = MailboxTaskServer(METHODS, queues, learner_id="node-0", isolation="thread")
    thread = threading.Thread(target=server.run)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.stop)
    before = sum(box.usage.requests.values())
    for _ in range(40):
        queues.send_inputs(method="nothing")
    assert len(results_of(queues, 40)) == 40
    assert (sum(box.usage.requests.values()) - before) / 40 <= 8


def test_a_hundred_megabytes_go_both_ways(folder: str, node: Node) -> None:
    queues = MailboxQueues(folder, **QUICK)
    node(queues)
    big = np.arange(100 * 2**20 // 8)
    queues.send_inputs(big, method="same", keep_inputs=False)
    assert np.array_equal(queues.get_result(timeout=100).value, big)
    assert objects(folder, "data/") == []


def test_results_that_stream_large_tensors_leave_nothing_behind(mailbox: MemoryMailbox, node: Node) -> None:
    queues = MailboxQueues(mailbox, **QUICK)
    node(queues, isolation="thread")
    queues.send_inputs(3, method="stream_tensors")
    values = [result.value for result in results_of(queues, 4)]
    assert [value if isinstance(value, str) else value.shape[0] for value in values] == [50_000] * 3 + ["end"]
    assert objects(mailbox, "data/") == []
    assert len(objects(mailbox, "results/")) == 1


def test_a_value_that_is_too_large_is_a_failure_that_says_so(mailbox: MemoryMailbox, node: Node) -> None:
    queues = MailboxQueues(mailbox, max_value_bytes=100_000, **QUICK)
    node(queues, isolation="thread")
    with pytest.raises(ConfigError, match="raise max_value_bytes"):
        queues.send_inputs(bytes(200_000), method="same")
    assert queues.active_count == 0


def test_what_others_put_into_the_mailbox_is_a_failed_task_at_worst(mailbox: MemoryMailbox, node: Node) -> None:
    queues = MailboxQueues(mailbox, **QUICK)
    keys = TaskKeys.of("default")
    first = queues.send_inputs(1, method="same")
    (request,) = mailbox.list(keys.requests("same"))
    mailbox.put(request, b"not a task")
    mailbox.put(keys.requests("same") + "nonsense", b"")
    second = queues.send_inputs(2, method="same")
    (_, other) = sorted(key for key in mailbox.list(keys.requests("same")) if not key.endswith("nonsense"))
    stolen = mailbox.get(other).replace(b'"2"', b'{"key": "run.json", "size": 1, "sha256": "' + b"0" * 64 + b'"}')
    mailbox.put(other, stolen)
    node(queues, isolation="thread")
    results = {result.task_id: result for result in results_of(queues, 2)}
    assert "not JSON" in results[first].failure_info.exception
    assert "no value of this queue" in results[second].failure_info.exception


def test_a_task_without_a_method_is_refused(mailbox: MemoryMailbox) -> None:
    with pytest.raises(ConfigError, match="needs method="):
        MailboxQueues(mailbox).send_inputs(1)
    with pytest.raises(ConfigError, match="poll_interval must be above 0"):
        MailboxQueues(mailbox, poll_interval=0)
    with pytest.raises(ConfigError, match="only a server's end"):
        MailboxQueues(mailbox).get_task(timeout=0)


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


def serve_one(end: MailboxQueues) -> None:
    _, task = end.get_task(timeout=30)
    end.send_result(execute(same, end.ready(task), emit=end.send_result))


@contextlib.contextmanager
def server_end(queues: MailboxQueues) -> Iterator[MailboxQueues]:
    end = queues.for_server(ServerInfo(server_id="mortal", slots=1, methods=("same",)))
    try:
        yield end
    finally:
        with contextlib.suppress(Crash):
            end._server._work.close()
        with contextlib.suppress(Crash):
            end._server._presence.close()


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


# --- stopping, joining, cancelling ------------------------------------------------------------------------


def test_one_signal_stops_all_nodes_and_what_runs_is_finished(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, **QUICK)
    nodes = [node(queues, f"node-{number}") for number in range(2)]
    for number in range(2):
        queues.send_inputs(str(tmp_path / "go"), str(tmp_path / f"began{number}"), method="wait_for")
    until(lambda: all((tmp_path / f"began{number}").exists() for number in range(2)))
    queues.send_kill_signal()
    (tmp_path / "go").touch()
    assert {result.worker_info.server for result in results_of(queues, 2)} == {"node-0", "node-1"}
    for server in nodes:
        server.join(60)
        assert server.exitcode == 0
    assert queues.servers() == []


def test_what_waits_when_the_signal_comes_is_run_unless_the_caller_says_otherwise(mailbox: MemoryMailbox) -> None:
    queues = MailboxQueues(mailbox, **QUICK)
    for number in range(3):
        queues.send_inputs(number, method="same")
    queues.send_kill_signal(drain=False)
    with server_end(MailboxQueues(mailbox, **QUICK)) as end, pytest.raises(KillSignal, match="leave what waits"):
        end.get_task()
    queues.send_kill_signal()
    with server_end(MailboxQueues(mailbox, **QUICK)) as end:
        for _ in range(3):
            serve_one(end)
        with pytest.raises(KillSignal):
            end.get_task()
    assert [result.value for result in results_of(queues, 3)] == [0, 1, 2]


def test_a_new_campaign_of_the_same_name_is_not_stopped_by_the_old_signal(mailbox: MemoryMailbox) -> None:
    MailboxQueues(mailbox, **QUICK).send_kill_signal()
    queues = MailboxQueues(mailbox, **QUICK)
    queues.send_inputs(1, method="same")
    with server_end(MailboxQueues(mailbox, **QUICK)) as end:
        serve_one(end)
        with pytest.raises(TimeoutError):
            end.get_task(timeout=0.05)


def test_a_late_node_has_work_at_once_and_no_node_holds_more_than_its_slots(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, **QUICK)
    for number in range(6):
        queues.send_inputs(str(tmp_path / "go"), str(tmp_path / f"began{number}"), method="wait_for")
    node(queues, "early", slots=2)
    until(lambda: len(list(tmp_path.glob("began?"))) == 2)
    node(queues, "late", slots=1)
    until(lambda: len(list(tmp_path.glob("began?"))) == 3)
    assert len(objects(folder, "claims/")) == 3
    (tmp_path / "go").touch()
    servers = [result.worker_info.server for result in results_of(queues, 6)]
    assert set(servers) == {"early", "late"}


def test_a_queued_task_and_a_running_one_can_be_cancelled(folder: str, node: Node, tmp_path: Path) -> None:
    queues = MailboxQueues(folder, **QUICK)
    queued = queues.send_inputs(1, method="same")
    assert queues.cancel(queued)
    node(queues)
    running = queues.send_inputs(str(tmp_path / "never"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    assert queues.cancel(running)
    results = results_of(queues, 2)
    assert [result.task_id for result in results] == [queued, running]
    assert all(result.success is False and "cancelled" in result.failure_info.exception for result in results)
    until(lambda: not runs(int((tmp_path / "began").read_text())))
    queues.send_inputs(2, method="f")
    assert queues.get_result(timeout=60).value == 1
    assert not queues.cancel(running)


def test_cancelling_a_task_that_has_ended_says_so(mailbox: MemoryMailbox) -> None:
    queues = MailboxQueues(mailbox, **QUICK)
    task_id = queues.send_inputs(1, method="same")
    with server_end(MailboxQueues(mailbox, **QUICK)) as end:
        serve_one(end)
    assert not queues.cancel(task_id)
    assert queues.get_result(timeout=10).value == 1


def test_nodes_say_who_they_are_and_one_that_died_is_missed_after_its_lease(folder: str, node: Node) -> None:
    queues = MailboxQueues(folder, **QUICK)
    server = node(queues, "node-7", slots=3)
    until(queues.servers)
    (info,) = queues.servers()
    assert (info.server_id, info.slots, "f" in info.methods) == ("node-7", 3, True)
    server.kill()
    until(lambda: not queues.servers())


def test_nodes_that_never_come_are_reported(mailbox: MemoryMailbox) -> None:
    queues = MailboxQueues(mailbox, server_timeout=0.1, **QUICK)
    queues.send_inputs(1, method="f")
    with pytest.raises(NoTaskServer, match="no task server has been there"):
        queues.get_result()


# --- the Thinker ------------------------------------------------------------------------------------------


class Collector(BaseThinker):
    """Sends its tasks and is done; its processor collects what comes."""

    def __init__(self, queues: MailboxQueues, tasks: list[tuple[str, Any]]) -> None:
        super().__init__(queues)
        self.tasks = tasks
        self.values: list[Any] = []

    @agent
    def send(self) -> None:
        for method, argument in self.tasks:
            self.queues.send_inputs(argument, method=method)

    @result_processor
    def collect(self, result: Result) -> None:
        self.values.append(result.value)


def test_a_task_that_is_quicker_than_the_answer_to_its_request_does_not_keep_the_thinker(mailbox: MemoryMailbox, node: Node) -> None:
    node(MailboxQueues(mailbox, **QUICK), isolation="thread")
    thinker = Collector(MailboxQueues(Slow(mailbox, latency_s=0.05), **QUICK), [("same", 1), ("same", 2)])
    thinker.run()
    assert sorted(thinker.values) == [1, 2]


def test_a_processor_sees_all_that_streams_in_after_done(folder: str, node: Node) -> None:
    queues = MailboxQueues(folder, **QUICK)
    thinker = Collector(queues, [("count_up", 5)])
    thinker.start()
    assert thinker.done.wait(10)
    node(queues)
    assert thinker.join(60)
    assert thinker.values == [0, 1, 2, 3, 4, 5]


def test_a_thinker_that_was_killed_is_replaced_and_every_result_is_dealt_with_once(
    folder: str, node: Node, serve: Any, tmp_path: Path
) -> None:
    import multiprocessing

    log = tmp_path / "log"
    first = multiprocessing.get_context("spawn").Process(target=think_and_die, args=(folder, str(log), 6))
    first.start()
    node(MailboxQueues(folder, name="campaign", **QUICK))
    first.join(60)
    assert first.exitcode == -signal.SIGKILL
    queues = MailboxQueues(folder, name="campaign", auto_ack=False, **QUICK)
    left = queues.recover()
    assert queues.active_count == len(left) == 4
    thinker = Collector(queues, [])
    thinker.run()
    dealt_with = [int(line) for line in log.read_text().split()]
    assert sorted(dealt_with + thinker.values) == [0, 1, 2, 3, 4, 5]
    assert objects(folder, "requests/", "campaign") == []


def test_campaigns_of_different_names_do_not_meet(mailbox: MemoryMailbox) -> None:
    one, other = MailboxQueues(mailbox, name="one", **QUICK), MailboxQueues(mailbox, name="other", **QUICK)
    one.send_inputs(1, method="same")
    with server_end(other) as end, pytest.raises(TimeoutError):
        end.get_task(timeout=0.03)
    one.flush()
    assert list(mailbox.list("steering/one/")) == []
