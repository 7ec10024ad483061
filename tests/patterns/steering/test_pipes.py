"""Queues and servers of one machine: nothing is lost, whoever dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from steering_tasks import (
    call_back,
    crash,
    echo,
    f,
    fail,
    fail_times,
    in_main_thread,
    kill_server,
    leave,
    nothing,
    same,
    unpicklable,
    wait_for,
    where,
)

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, KillSignal, NoTaskServer, WorkFenced
from gradientmail_torch.patterns.steering import LocalTaskServer, PipeQueues, ServerInfo
from gradientmail_torch.patterns.steering.queues.office import Office, _inherited

Pipes = Callable[..., PipeQueues]
Local = Callable[..., LocalTaskServer]


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        SYSTEM_CLOCK.sleep(0.005)


def test_every_argument_of_send_inputs_arrives(pipes: Pipes) -> None:
    queues = pipes("a")
    task_id = queues.send_inputs(
        "ab",
        method="m",
        input_kwargs={"1": 1},
        keep_inputs=False,
        resources={"node_count": 2, "walltime_s": 5},
        topic="a",
        task_info={"info": [1]},
        max_retries=3,
    )
    topic, task = queues.get_task()
    task.deserialize()
    assert (topic, task.topic, task.task_id, task.method) == ("a", "a", task_id, "m")
    assert (task.args, task.kwargs, task.keep_inputs) == (("ab",), {"1": 1}, False)
    assert (task.resources.node_count, task.resources.walltime_s) == (2, 5)
    assert (task.task_info, task.max_retries, task.retries) == ({"info": [1]}, 3, 0)


def test_an_unknown_topic_is_a_value_error_on_both_sides(pipes: Pipes) -> None:
    queues = pipes("steer", "simulate")
    with pytest.raises(ValueError, match=r"unknown topic 'simulation'.*default, simulate, steer"):
        queues.send_inputs(1, method="expensive_func", topic="simulation")
    with pytest.raises(ValueError, match="unknown topic"):
        queues.get_result(topic="simulation")
    queues.send_inputs(1)
    _, task = queues.get_task()
    task.topic = "simulation"
    with pytest.raises(ValueError, match="unknown topic"):
        queues.send_result(task)
    assert queues.active_count == 1


def test_topics_are_kept_apart_and_waiting_ends_in_time(pipes: Pipes) -> None:
    queues = pipes("a", "b")
    queues.send_inputs(1, topic="a")
    _, task = queues.get_task()
    task.set_result(2)
    queues.send_result(task)
    began = SYSTEM_CLOCK.monotonic()
    with pytest.raises(TimeoutError, match=r"no result of topic 'b' within 0\.05 s"):
        queues.get_result("b", timeout=0.05)
    assert SYSTEM_CLOCK.monotonic() - began < 5
    assert queues.get_result("a", timeout=0).value == 2
    with pytest.raises(TimeoutError):
        queues.get_task(timeout=0)


def test_resources_and_info_of_the_wrong_kind_are_refused_before_anything_is_sent(pipes: Pipes) -> None:
    queues = pipes()
    with pytest.raises(ConfigError, match="resources"):
        queues.send_inputs(resources={"node_count": "all"})
    with pytest.raises(ConfigError, match="task_info"):
        queues.send_inputs(task_info={"x": object()})
    with pytest.raises(ConfigError, match="topics must be a list"):
        PipeQueues(topics="trial")
    assert queues.active_count == 0
    assert queues.wait_until_done(timeout=0)


def test_a_thousand_sends_need_no_reader(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    for number in range(1000):
        queues.send_inputs(number, method="same")
    assert queues.active_count == 1000
    local([same], queues, threads=True)
    assert [queues.get_result(timeout=60).value for _ in range(1000)] == list(range(1000))
    assert queues.wait_until_done(timeout=0)


def test_a_hundred_megabytes_go_both_ways(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    local([same], queues)
    big = np.arange(100 * 2**20 // 8)
    queues.send_inputs(big, method="same", keep_inputs=False)
    assert np.array_equal(queues.get_result(timeout=60).value, big)


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("threads", [True, False])
def test_every_start_method_works_for_server_and_workers(pipes: Pipes, local: Local, start_method: str, threads: bool) -> None:
    queues = pipes()
    server = local([f, where], queues, start_method=start_method, threads=threads)
    queues.send_inputs(2, method="f")
    assert queues.get_result(timeout=30).value == 1
    queues.send_inputs(method="where")
    found = queues.get_result(timeout=30)
    assert (found.value["pid"] == server.pid) is threads
    queues.send_kill_signal()
    server.join(30)
    assert server.exitcode == 0


def test_a_function_can_ask_for_its_task_and_its_resources(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    local([where], queues, threads=True)
    task_id = queues.send_inputs(method="where", resources={"cpu_threads": 4})
    found = queues.get_result(timeout=30)
    assert found.value["task_id"] == task_id
    assert (found.value["threads"], found.value["attempt"]) == (4, 1)
    assert found.worker_info.pid == found.value["pid"]


@pytest.mark.parametrize("threads", [True, False])
def test_a_function_can_stream_from_a_callback(pipes: Pipes, local: Local, threads: bool) -> None:
    queues = pipes(keep_inputs=False)
    local([call_back], queues, threads=threads)
    queues.send_inputs(2, method="call_back")
    found = [queues.get_result(timeout=30) for _ in range(3)]
    assert [(result.value, result.complete, result.inputs) for result in found] == [
        (0, False, ((), {})),
        (1, False, ((), {})),
        ("end", True, ((), {})),
    ]


def test_a_task_in_a_process_has_the_main_thread(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    local([in_main_thread], queues)
    queues.send_inputs(method="in_main_thread")
    assert queues.get_result(timeout=30).value is True


def test_all_marks_are_made_in_order(pipes: Pipes, local: Local) -> None:
    from gradientmail_torch.patterns.steering.result import MARKS

    queues = pipes()
    local([nothing], queues)
    queues.send_inputs(method="nothing")
    result = queues.get_result(timeout=30)
    marks = [getattr(result.timestamp, name) for name in MARKS]
    assert None not in marks
    assert marks == sorted(marks)
    parts = result.overhead()
    assert parts.total_s == pytest.approx(
        parts.queues_s + parts.server_s + parts.engine_s + parts.serialization_s + parts.running_s + parts.worker_s, abs=1e-6
    )


def test_inputs_come_back_only_where_they_are_kept(pipes: Pipes, local: Local) -> None:
    queues = pipes(keep_inputs=False)
    local([echo], queues, threads=True)
    queues.send_inputs(1, method="echo", input_kwargs={"a": 2})
    assert queues.get_result(timeout=30).inputs == ((), {})
    queues.send_inputs(1, method="echo", input_kwargs={"a": 2}, keep_inputs=True)
    assert queues.get_result(timeout=30).inputs == ((1,), {"a": 2})


# --- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "argument", "text"),
    [
        ("fail", "wrong", "ValueError.*wrong"),
        ("leave", 3, "SystemExit.*3"),
        ("crash", signal.SIGKILL, "was killed by SIGKILL"),
        ("crash", signal.SIGSEGV, "was killed by SIGSEGV"),
        ("unpicklable", None, "the result cannot be pickled"),
        ("elsewhere", 1, "method 'elsewhere' is not offered here; these are: crash, f, fail, leave, unpicklable"),
    ],
)
def test_whatever_a_task_does_there_is_one_result_and_the_next_one_runs(
    pipes: Pipes, local: Local, method: str, argument: Any, text: str
) -> None:
    queues = pipes()
    local([f, fail, leave, crash, unpicklable], queues)
    queues.send_inputs(*([] if argument is None else [argument]), method=method)
    queues.send_inputs(2, method="f")
    results = {result.method: result for result in (queues.get_result(timeout=30) for _ in range(2))}
    assert results["f"].value == 1
    assert results[method].success is False
    assert results[method].value is None
    assert re.search(text, results[method].failure_info.exception)


def test_a_retry_begins_with_the_inputs_though_they_are_not_kept(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes(keep_inputs=False)
    local([fail_times], queues)
    queues.send_inputs(2, str(tmp_path), method="fail_times", max_retries=2)
    result = queues.get_result(timeout=30)
    assert (result.value, result.success, result.retries) == (3, True, 2)
    assert result.failure_info is None


def test_retries_come_to_an_end(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    local([fail], queues, threads=True)
    queues.send_inputs("x", method="fail", max_retries=2)
    result = queues.get_result(timeout=30)
    assert (result.success, result.retries) == (False, 2)


def test_a_task_that_runs_over_its_wall_time_is_killed(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes()
    local([wait_for, f], queues)
    queues.send_inputs(str(tmp_path / "never"), method="wait_for", resources={"walltime_s": 0.1})
    queues.send_inputs(2, method="f")
    assert "over its wall time of 0.1 s" in queues.get_result(timeout=30).failure_info.exception
    assert queues.get_result(timeout=30).value == 1


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_a_server_that_dies_has_its_task_handed_to_the_next(pipes: Pipes, local: Local, tmp_path: Path, start_method: str) -> None:
    queues = pipes()
    first = local([wait_for], queues, start_method=start_method)
    task_id = queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    worker = int((tmp_path / "began").read_text())
    first.kill()
    until(lambda: not queues.servers())
    until(lambda: not _runs(worker))  # an orphan would work for nobody
    local([wait_for], queues)
    (tmp_path / "go").touch()
    result = queues.get_result(timeout=30)
    assert (result.task_id, result.success, result.worker_info.attempt) == (task_id, True, 2)


def test_a_task_that_kills_every_server_comes_to_an_end(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes(max_attempts=2)
    queues.send_inputs(str(tmp_path / "pid"), method="kill_server")
    for _ in range(2):
        server = local([kill_server], queues)
        scratch = tmp_path / "scratch"
        scratch.write_text(str(server.pid))
        scratch.replace(tmp_path / "pid")
        server.join(30)
    assert "2 task servers took this task" in queues.get_result(timeout=30).failure_info.exception


def test_a_server_that_never_comes_is_reported(pipes: Pipes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    queues = pipes(server_timeout=0.2)
    queues.send_inputs(1, method="f")
    with pytest.raises(NoTaskServer, match=r"1 tasks wait.*start one"):
        queues.get_result()
    monkeypatch.setattr("gradientmail_torch.patterns.steering.queues.base.REPORT_EVERY_S", 0.1)
    patient = pipes(server_timeout=None)
    patient.send_inputs(1, method="f")
    with pytest.raises(TimeoutError, match="1 tasks are under way"):
        patient.get_result(timeout=0.8)
    assert "1 tasks wait in PipeQueues, and no task server has been there" in caplog.text


def test_the_last_server_that_dies_is_noticed(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes(server_timeout=0.2)
    server = local([wait_for], queues)
    queues.send_inputs(str(tmp_path / "never"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    server.kill()
    with pytest.raises(NoTaskServer):
        queues.get_result()


# --- stopping ---------------------------------------------------------------------------------------------


def test_one_signal_stops_all_servers_and_what_runs_is_finished(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes()
    servers = [local([wait_for], queues) for _ in range(3)]
    for number in range(3):
        queues.send_inputs(str(tmp_path / "go"), str(tmp_path / f"began{number}"), method="wait_for")
    until(lambda: all((tmp_path / f"began{number}").exists() for number in range(3)))
    queues.send_kill_signal()
    (tmp_path / "go").touch()
    assert all(queues.get_result(timeout=30).success for _ in range(3))
    for server in servers:
        server.join(30)
        assert server.exitcode == 0


def test_what_waits_when_the_signal_comes_is_run_unless_the_caller_says_otherwise(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    for number in range(3):
        queues.send_inputs(number, method="same")
    queues.send_kill_signal(drain=False)
    server = local([same], queues, threads=True)
    server.join(30)
    assert server.exitcode == 0
    queues.send_kill_signal()
    local([same], queues, threads=True)
    assert [queues.get_result(timeout=30).value for _ in range(3)] == [0, 1, 2]


def test_on_notice_a_server_gives_back_what_it_runs(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes()
    first = local([wait_for], queues)
    queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    first.terminate()
    first.join(30)
    assert first.exitcode == 0
    local([wait_for], queues)
    (tmp_path / "go").touch()
    assert queues.get_result(timeout=30).success


def test_a_server_without_tasks_ends_after_its_timeout(pipes: Pipes, local: Local) -> None:
    server = local([f], pipes(), threads=True, timeout=0.1)
    server.join(30)
    assert server.exitcode == 0


def test_a_server_ends_when_the_thinkers_process_is_gone(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    server = local([f], queues, threads=True)
    until(queues.servers)
    queues.close()
    server.join(30)
    assert server.exitcode == 0


def test_a_waiting_task_can_be_cancelled_and_so_can_a_running_one(pipes: Pipes, local: Local, tmp_path: Path) -> None:
    queues = pipes()
    local([wait_for, f], queues)
    running = queues.send_inputs(str(tmp_path / "never"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    waiting = queues.send_inputs(1, method="f")
    assert queues.cancel(waiting)
    assert queues.cancel(running)
    found = [queues.get_result(timeout=30) for _ in range(2)]
    assert [result.task_id for result in found] == [waiting, running]
    assert all("cancelled" in result.failure_info.exception for result in found)
    queues.send_inputs(2, method="f")
    assert queues.get_result(timeout=30).value == 1  # the slot is free again
    assert not queues.cancel(running)
    until(lambda: not _runs(int((tmp_path / "began").read_text())))


# --- the Thinker ------------------------------------------------------------------------------------------


def test_a_new_thinker_takes_over_what_the_last_one_left(pipes: Pipes, local: Local) -> None:
    queues = pipes("a")
    sent = [queues.send_inputs(number, method="same", topic="a") for number in range(3)]
    local([same], queues, threads=True)
    first = queues.get_result("a", timeout=30)
    again = PipeQueues.__new__(PipeQueues)
    again.__setstate__(queues.__getstate__())
    assert again.active_count == 0
    assert sorted(again.recover()) == sorted(set(sent) - {first.task_id})
    assert [again.get_result("a", timeout=30).value for _ in range(2)] == [1, 2]
    again.close()


def test_a_late_result_of_a_server_that_lost_the_task_is_refused(pipes: Pipes) -> None:
    queues = pipes()
    first, second = (queues.for_server(ServerInfo(server_id=name, slots=1)) for name in "ab")
    queues.send_inputs(1)
    _, task = first.get_task(timeout=10)
    first.close()
    _, again = second.get_task(timeout=10)
    task.set_result("late")
    assert first.is_revoked(task)
    with pytest.raises(WorkFenced):
        first.send_result(task)
    again.set_result("right")
    second.send_result(again)
    assert queues.get_result(timeout=10).value == "right"
    second.close()


def test_using_the_wrong_side_is_warned_of(pipes: Pipes) -> None:
    queues = pipes()
    queues.set_role("client")
    queues.send_inputs(1)
    with pytest.warns(UserWarning, match="get_task is meant for the server"):
        queues.get_task()
    with pytest.raises(ConfigError, match="role must be"):
        queues.set_role("boss")


def test_flush_forgets_everything(pipes: Pipes) -> None:
    queues = pipes()
    queues.send_inputs(1)
    queues.flush()
    assert queues.active_count == 0
    with pytest.raises(TimeoutError):
        queues.get_task(timeout=0)


def test_servers_say_who_they_are(pipes: Pipes, local: Local) -> None:
    queues = pipes()
    local([f, same], queues, threads=True, num_workers=3)
    until(queues.servers)
    (info,) = queues.servers()
    assert (info.slots, info.methods) == (3, ("f", "same"))


def test_a_closed_queue_is_not_closed_again_in_a_forked_child(pipes: Pipes, local: Local) -> None:
    first, second = pipes(), pipes()
    first.close()
    assert {office.address for office in _inherited if isinstance(office, Office)} >= {second._address}
    assert first._address not in {office.address for office in _inherited if isinstance(office, Office)}
    local([f], second, start_method="fork", threads=True)
    second.send_inputs(2, method="f")
    assert second.get_result(timeout=30).value == 1


def test_a_closed_queue_says_so(pipes: Pipes) -> None:
    queues = pipes()
    queues.close()
    with pytest.raises(KillSignal, match=r"closed|ended"):
        queues.get_result(timeout=1)


@pytest.mark.parametrize(
    ("methods", "text"),
    [([], "at least one"), ([f, f], "two methods are called 'f'"), ([3], "function with a name"), ("queues", "function with a name")],
)
def test_methods_that_cannot_be_served_are_refused(pipes: Pipes, methods: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LocalTaskServer(methods, pipes())


def test_arguments_in_the_wrong_order_are_named(pipes: Pipes) -> None:
    with pytest.raises(ConfigError, match=r"the order is \(methods, queues"):
        LocalTaskServer(pipes(), [f])  # type: ignore[arg-type]


def test_methods_that_a_new_process_cannot_have_are_named_with_the_cure(pipes: Pipes) -> None:
    def inner() -> None: ...

    with pytest.raises(ConfigError, match="top level of a module"):
        LocalTaskServer([inner], pipes()).start()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
