"""Steering over a mailbox: nodes come and go, and every task has exactly one result."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mailbox_nodes import METHODS, QUICK, Node, objects, results_of, runs, serve_one, server_end, until
from steering_tasks import (
    f,
    think_and_die,
)

from gradientmail_torch.errors import ConfigError, KillSignal, NoTaskServer
from gradientmail_torch.keys import TaskKeys
from gradientmail_torch.mailbox import CountingMailbox, SignedMailbox, open_mailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.steering import BaseThinker, MailboxQueues, MailboxTaskServer, Result, agent, result_processor
from gradientmail_torch.testing.faults import Slow

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


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_result_that_is_too_large_fails_its_task_and_not_its_servers(isolation: str, folder: str, node: Node) -> None:
    queues = MailboxQueues(folder, **QUICK)
    node(MailboxQueues(folder, max_value_bytes=100_000, **QUICK), isolation=isolation)
    for method in ("many", "stream_tensors"):
        queues.send_inputs(200_000, method=method)
        failed = queues.get_result(timeout=60)
        assert failed.success is False
        assert "raise max_value_bytes" in failed.failure_info.exception
    queues.send_inputs("still there", method="same")
    assert queues.get_result(timeout=60).value == "still there"


def test_a_server_serves_topics_that_it_was_not_told_of(mailbox: MemoryMailbox, node: Node) -> None:
    queues = MailboxQueues(mailbox, topics=["trial"], **QUICK)
    node(MailboxQueues(mailbox, **QUICK), isolation="thread")
    queues.send_inputs(1, method="same", topic="trial")
    assert queues.get_result("trial", timeout=60).value == 1


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


def test_what_strangers_put_into_a_signed_mailbox_ends_no_server_and_no_thinker(mailbox: MemoryMailbox, node: Node) -> None:
    signed = SignedMailbox(mailbox, "secret of the run" * 2)
    queues = MailboxQueues(signed, **QUICK)
    keys = TaskKeys.of("default")
    first = queues.send_inputs(1, method="same")
    (request,) = mailbox.list(keys.requests("same"))
    mailbox.put(request, b"{}")
    mailbox.put(keys.stop(), b"{}")
    mailbox.put(keys.server("stranger"), b"{}")
    node(queues, isolation="thread")
    failed = queues.get_result(timeout=60)
    assert failed.task_id == first
    assert "is not signed" in failed.failure_info.exception
    queues.send_inputs(2, method="same")
    assert queues.get_result(timeout=60).value == 2
    assert [info.server_id for info in queues.servers()] == ["node-0"]


@pytest.mark.parametrize("change", [{"task_id": "another"}, {"complete": False}])
def test_a_result_that_is_not_what_its_name_says_is_a_failed_one(change: dict[str, Any], mailbox: MemoryMailbox) -> None:
    queues = MailboxQueues(mailbox, **QUICK)
    sent = queues.send_inputs(1, method="same")
    with server_end(queues) as end:
        serve_one(end)
    (key,) = mailbox.list(TaskKeys.of("default").results("default"))
    record = json.loads(mailbox.get(key))
    record["value"] |= change
    mailbox.put(key, json.dumps(record).encode())
    failed = queues.get_result(timeout=60)
    assert (failed.task_id, failed.success) == (sent, False)
    assert "does not hold the result" in failed.failure_info.exception
    assert queues.active_count == 0


def test_a_request_leaves_room_for_what_comes_back(mailbox: MemoryMailbox) -> None:
    with pytest.raises(ConfigError, match="pass it as an argument"):
        MailboxQueues(mailbox).send_inputs(1, method="same", task_info={"text": "x" * (12 << 20)})


def test_a_timeout_that_is_no_number_is_refused(mailbox: MemoryMailbox) -> None:
    queues = MailboxQueues(mailbox)
    for wait in (queues.get_result, queues.get_task):
        with pytest.raises(ConfigError, match="not nan"):
            wait(timeout=math.nan)


def test_a_task_without_a_method_is_refused(mailbox: MemoryMailbox) -> None:
    with pytest.raises(ConfigError, match="needs method="):
        MailboxQueues(mailbox).send_inputs(1)
    with pytest.raises(ConfigError, match="poll_interval must be above 0"):
        MailboxQueues(mailbox, poll_interval=0)
    with pytest.raises(ConfigError, match="only a server's end"):
        MailboxQueues(mailbox).get_task(timeout=0)


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
