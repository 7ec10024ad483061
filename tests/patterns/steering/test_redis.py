"""Queues over a real Redis server: nothing is lost, and each task has one result."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from steering_tasks import count_up, f, kill_server, same, wait_for

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, KillSignal, MailboxUnavailable, WorkFenced
from gradientmail_torch.patterns.steering import LocalTaskServer, RedisQueue, RedisQueues, ServerInfo

Queues = Callable[..., RedisQueues]
METHODS = [f, same, count_up, wait_for, kill_server]


def until(condition: Callable[[], Any]) -> None:
    while not condition():
        SYSTEM_CLOCK.sleep(0.005)


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A real Redis server, from the Debian package ``redis-server``."""
    program = shutil.which("redis-server")
    assert program, "the tests of RedisQueues need redis-server: apt-get install redis-server"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    server = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        until(lambda: _answers(port))
        yield port
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16) == b"+PONG\r\n"
    except OSError:
        return False


@pytest.fixture
def redis(redis_port: int, stack: ExitStack) -> Queues:
    return lambda *topics, **settings: stack.enter_context(RedisQueues(topics, port=redis_port, **{"lease": 1.0} | settings))


def test_tasks_run_and_their_results_come_back(redis: Queues, local: Any) -> None:
    queues = redis("a")
    local(METHODS, queues, num_workers=2)
    sent = [queues.send_inputs(x, method="f", topic="a", task_info={"x": x}) for x in range(5)]
    results = [queues.get_result("a", timeout=30) for _ in sent]
    assert sorted(result.task_id for result in results) == sorted(sent)
    assert all(result.value == f(result.task_info["x"]) for result in results)
    assert queues.active_count == 0
    assert queues.recover() == []


def test_a_generator_streams(redis: Queues, local: Any) -> None:
    queues = redis()
    local(METHODS, queues)
    queues.send_inputs(3, method="count_up")
    found = [queues.get_result(timeout=30) for _ in range(4)]
    assert [(result.value, result.complete) for result in found] == [(0, False), (1, False), (2, False), (3, True)]


def test_a_server_that_is_killed_has_its_task_taken_over(redis: Queues, local: Any, tmp_path: Path) -> None:
    queues = redis()
    first = local(METHODS, queues)
    task_id = queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    first.kill()
    local(METHODS, queues)
    (tmp_path / "go").touch()
    result = queues.get_result(timeout=30)
    assert (result.task_id, result.success, result.worker_info.attempt) == (task_id, True, 2)
    with pytest.raises(TimeoutError):
        queues.get_result(timeout=0.05)


def test_a_server_that_slept_through_its_lease_finds_its_result_refused(redis: Queues, local: Any, tmp_path: Path) -> None:
    queues = redis()
    sleeper = local(METHODS, queues)
    queues.send_inputs(str(tmp_path / "go"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    child = int((tmp_path / "began").read_text())
    os.kill(sleeper.pid, signal.SIGSTOP)
    local(METHODS, queues)
    until(lambda: int((tmp_path / "began").read_text()) != child)
    (tmp_path / "go").touch()
    assert queues.get_result(timeout=30).worker_info.attempt == 2
    os.kill(sleeper.pid, signal.SIGCONT)
    queues.send_inputs(1, method="same")
    assert queues.get_result(timeout=30).value == 1
    with pytest.raises(TimeoutError):
        queues.get_result(timeout=0.05)


def test_a_task_that_kills_every_server_comes_to_an_end(redis: Queues, local: Any, tmp_path: Path) -> None:
    queues = redis(max_attempts=2)
    queues.send_inputs(str(tmp_path / "pid"), method="kill_server")
    for _ in range(2):
        server = local(METHODS, queues)
        (tmp_path / "scratch").write_text(str(server.pid))
        (tmp_path / "scratch").replace(tmp_path / "pid")
        server.join(30)
        (tmp_path / "pid").unlink()
    local(METHODS, queues)
    assert "2 task servers took this task" in queues.get_result(timeout=30).failure_info.exception


def test_a_late_result_is_refused(redis: Queues) -> None:
    queues = redis(lease=0.2)
    queues.send_inputs(1, method="same")
    first, second = (queues.for_server(ServerInfo(server_id=name, slots=1)) for name in "ab")
    task = first.get_task(timeout=10)[1]
    assert not first.is_revoked(task)
    first.give_back(task)
    again = second.get_task(timeout=10)[1]
    assert first.is_revoked(task)
    with pytest.raises(WorkFenced):
        first.send_result(task)
    again.deserialize()
    again.set_result("right")
    second.send_result(again)
    assert queues.get_result(timeout=10).value == "right"
    for end in (first, second):
        end.close()


def test_one_signal_stops_all_servers(redis: Queues, local: Any) -> None:
    queues = redis()
    servers = [local(METHODS, queues, threads=True) for _ in range(2)]
    until(lambda: len(queues.servers()) == 2)
    for number in range(3):
        queues.send_inputs(number, method="same")
    queues.send_kill_signal()
    assert sorted(queues.get_result(timeout=30).value for _ in range(3)) == [0, 1, 2]
    for server in servers:
        server.join(30)
        assert server.exitcode == 0
    assert queues.servers() == []


def test_what_waits_may_be_left(redis: Queues) -> None:
    queues = redis()
    queues.send_inputs(1, method="same")
    queues.send_kill_signal(drain=False)
    with queues.for_server(ServerInfo(server_id="a", slots=1)) as end, pytest.raises(KillSignal):
        end.get_task()


def test_a_queued_task_and_a_running_one_can_be_cancelled(redis: Queues, local: Any, tmp_path: Path) -> None:
    queues = redis()
    queued = queues.send_inputs(1, method="same")
    assert queues.cancel(queued)
    local(METHODS, queues)
    running = queues.send_inputs(str(tmp_path / "never"), str(tmp_path / "began"), method="wait_for")
    until((tmp_path / "began").exists)
    assert queues.cancel(running)
    found = [queues.get_result(timeout=30) for _ in range(2)]
    assert [result.task_id for result in found] == [queued, running]
    assert all("cancelled" in result.failure_info.exception for result in found)
    queues.send_inputs(2, method="f")
    assert queues.get_result(timeout=30).value == 1
    assert not queues.cancel(running)


def test_a_new_thinker_takes_over_what_the_last_one_left(redis: Queues, local: Any) -> None:
    queues = redis("a", auto_ack=False, prefix=f"campaign-{os.getpid()}")
    local(METHODS, queues, threads=True)
    for number in range(4):
        queues.send_inputs(number, method="same", topic="a")
    queues.ack(queues.get_result("a", timeout=30))
    queues.get_result("a", timeout=30)  # and dies before it has dealt with it
    again = redis("a", prefix=queues.prefix)
    assert len(again.recover()) == again.active_count == 3
    assert sorted(again.get_result("a", timeout=30).value for _ in range(3)) == [1, 2, 3]
    assert again.recover() == []


def test_pickle_is_a_choice_of_both_sides(redis: Queues, local: Any) -> None:
    trusting = redis(prefix=f"pickle-{os.getpid()}", serialization_method="pickle")
    careful = redis(prefix=trusting.prefix)
    local(METHODS, careful, threads=True)
    trusting.send_inputs({1}, method="same")
    assert "does not take pickled values" in trusting.get_result(timeout=30).failure_info.exception


def test_queues_do_not_meet_and_flush_forgets(redis: Queues) -> None:
    one, other = redis(), redis()
    one.send_inputs(1, method="same")
    with other.for_server(ServerInfo(server_id="a", slots=1)) as end, pytest.raises(TimeoutError):
        end.get_task(timeout=0.05)
    one.flush()
    assert one.active_count == 0
    assert one.recover() == []


def test_a_redis_server_that_is_not_there_is_named_with_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(MailboxUnavailable, match=rf"127\.0\.0\.1:{port}.*Is it running"):
        RedisQueues(port=port)


def test_a_message_that_redis_cannot_hold_is_refused(redis: Queues, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradientmail_torch.patterns.steering.queues.redis.MAX_MESSAGE_BYTES", 1000)
    queues = redis()
    with pytest.raises(ConfigError, match="more than Redis takes"):
        queues.send_inputs(bytes(2000), method="same")
    assert queues.active_count == 0


def test_the_name_on_the_guide_works_too() -> None:
    assert RedisQueue is RedisQueues
    assert LocalTaskServer
