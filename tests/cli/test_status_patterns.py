"""gradientmail status: steering campaigns and synchronization in the same mailbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.cli.patterns_view import campaigns, synchronizations
from gradientmail_torch.cli.watching import BeatWatch
from gradientmail_torch.errors import WorkFailed
from gradientmail_torch.mailbox import CountingMailbox, open_mailbox
from gradientmail_torch.patterns.steering import MailboxQueues, ServerInfo
from gradientmail_torch.patterns.synchronization import SynchronizationNode, Workflow, sweep
from tests.cli.conftest import Command, join, together

Steer = Callable[..., tuple[MailboxQueues, MailboxQueues]]


@pytest.fixture
def steer() -> Iterator[Steer]:
    """Opens a campaign: the Thinker's end and a server's, which are closed after the test."""
    ends: list[MailboxQueues] = []

    def open_campaign(url: str, name: str = "tuning", server: str = "node-0") -> tuple[MailboxQueues, MailboxQueues]:
        thinker = MailboxQueues(url, name=name, poll_interval=0.01, lease=1.0)
        ends.extend([thinker.for_server(ServerInfo(server_id=server, slots=2, methods=("fit",), host="gpu-7")), thinker])
        return thinker, ends[-2]

    yield open_campaign
    for end in ends:
        end.close()


def do_one(server: MailboxQueues, value: int) -> None:
    _, task = server.get_task(timeout=30)
    task.deserialize()
    task.set_result(value)
    server.send_result(task)


def test_a_campaigns_tasks_are_counted_and_its_servers_named(command: Command, mailbox_url: str, steer: Steer) -> None:
    """Of seven tasks one was read, one is done and unread, one is in work, and four wait."""
    thinker, server = steer(mailbox_url)
    for number in range(7):
        thinker.send_inputs(number, method="fit")
    do_one(server, 1)
    thinker.get_result(timeout=30)
    do_one(server, 2)
    server.get_task(timeout=30)
    found = json.loads(command("status", mailbox_url, "--json").stdout)
    (campaign,) = found["campaigns"]
    (doer,) = campaign.pop("servers")
    assert campaign == {"name": "tuning", "queued": 4, "claimed": 1, "done": 2, "unread": 1, "stopping": False}
    assert (doer["server_id"], doer["host"], doer["slots"], doer["methods"], doer["beating"]) == ("node-0", "gpu-7", 2, ["fit"], True)
    thinker.send_kill_signal()
    text = command("status", mailbox_url).stdout
    assert "no training run here" in text
    assert "node-0 (2 slots, here); told to stop" in text


def test_a_dead_server_is_not_here(command: Command, tmp_path: Any, steer: Steer) -> None:
    url = str(tmp_path / "mailbox")
    steer(url)
    box, task = open_mailbox(url), keys.TaskKeys.of("tuning")
    box.put(task.server("dead"), (box.get(task.server("node-0")) or b"").replace(b'"node-0"', b'"dead"'))
    box.put(task.server("strange"), b"garbage")
    (campaign,) = json.loads(command("status", url, "--json", "--wait", "1").stdout)["campaigns"]
    assert {server["server_id"]: server["beating"] for server in campaign["servers"]} == {"node-0": True, "dead": False}


def test_all_campaigns_are_found_and_looking_costs_no_request_for_each_task(tmp_path: Any, steer: Steer) -> None:
    url = str(tmp_path / "mailbox")
    for name in ("a", "a-b"):
        thinker, _ = steer(url, name)
        for number in range(40):
            thinker.send_inputs(number, method="fit")
    box = CountingMailbox(open_mailbox(url))
    assert sorted((campaign.name, campaign.queued) for campaign in campaigns(box, BeatWatch())) == [("a", 40), ("a-b", 40)]
    assert sum(box.usage.requests.values()) <= 20


def test_synchronization_is_shown_with_who_is_missing(command: Command, mailbox_url: str) -> None:
    lone = SynchronizationNode("evaluate", ["shard-0", "shard-1", "shard-2"], mailbox_url, "node-0", run_id="epoch-7")
    lone.call("shard-1", 1)
    lone.skip("shard-0")
    ended = SynchronizationNode("evaluate", ["shard-0"], mailbox_url, "node-0", run_id="epoch-6")
    ended.call("shard-0", 1)
    ended.wait(lambda data, invocation: 1, timeout=30)
    broken = SynchronizationNode("evaluate", ["shard-0"], mailbox_url, "node-0", run_id="epoch-5")
    broken.call("shard-0", 1)
    with pytest.raises(WorkFailed):
        broken.wait(lambda data, invocation: 1 // 0, timeout=30)
    found = {each["run_id"]: each for each in json.loads(command("status", mailbox_url, "--json").stdout)["synchronizations"]}
    assert {run_id: each["nodes"][0]["state"] for run_id, each in found.items()} == {
        "epoch-5": "failed",
        "epoch-6": "done",
        "epoch-7": "waiting",
    }
    assert found["epoch-7"] == {
        "run_id": "epoch-7",
        "kind": "node",
        "nodes": [
            {"name": "evaluate", "state": "waiting", "reached": ["shard-0", "shard-1"], "missing": ["shard-2"], "attempts": 0},
        ],
    }
    text = command("status", mailbox_url).stdout
    assert "shard-2" in text
    assert "1 failed" in text


def test_a_workflow_is_shown_node_by_node(tmp_path: Any) -> None:
    box = open_mailbox(tmp_path / "mailbox")
    workflow = Workflow({"plan": ["train", "probe"], "train": ["evaluate"], "probe": ["evaluate"]}, box, "node-0", run_id="r7")
    workflow.invoke("plan", 1)
    workflow.invoke("train", 1, by="plan")
    (found,) = synchronizations(box)
    assert (found.run_id, found.kind) == ("r7", "workflow")
    assert {node.name: (node.state, node.missing) for node in found.nodes} == {
        "plan": ("complete", ()),
        "train": ("complete", ()),
        "probe": ("waiting", ("plan",)),
        "evaluate": ("waiting", ("train", "probe")),
    }


def test_what_is_swept_away_or_strange_is_not_shown(tmp_path: Any) -> None:
    box = open_mailbox(tmp_path / "mailbox")
    SynchronizationNode("evaluate", ["shard-0"], box, "node-0", run_id="old").call("shard-0", 1)
    sweep(box, "node-0", ttl=1e-6, lease=1e-6)
    assert sweep(box, "node-0", ttl=1e-6, lease=1e-6) == ["sync/old/node/evaluate/"]
    box.put("sync/strange", b"")
    box.put("sync/x/node/y/claims/z/garbage", b"")
    box.put("sync/x/node/y/manifest", b"garbage")
    assert synchronizations(box) == ()


def test_beside_a_run_they_come_after_it(command: Command, tmp_path: Any, steer: Steer) -> None:
    url = str(tmp_path / "mailbox")
    session, _ = join(url, "node-a", together(parties=1))
    session.close()
    thinker, _ = steer(url)
    thinker.send_inputs(1, method="fit")
    text = command("status", url).stdout
    assert text.index("node-a") < text.index("tuning")
