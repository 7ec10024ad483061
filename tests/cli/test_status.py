"""gradientmail status: who is there and how far the run is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gradientmail_torch import keys
from gradientmail_torch.cli.run_view import read_run
from gradientmail_torch.cli.watching import BeatWatch, sightings
from gradientmail_torch.errors import RunTimeout
from gradientmail_torch.mailbox import CountingMailbox, open_mailbox
from gradientmail_torch.messages import Beat, encode
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.patterns.queue import SharedQueue
from gradientmail_torch.testing.clock import ManualClock
from tests.cli.conftest import Command, join, together, train


def shown(command: Command, url: str, *options: str) -> Any:
    return json.loads(command("status", url, "--json", *options).stdout)


def test_a_finished_run_is_shown_at_once_with_all_who_took_part(command: Command, finished_run: str) -> None:
    status = shown(command, finished_run)
    assert [(each["learner_id"], each["presence"], each["state"], each["steps"]) for each in status["learners"]] == [
        ("node-a", "ended", "ended", 6),
        ("node-b", "ended", "ended", 6),
    ]
    assert [each["version"] for each in status["fragments"]] == [3, 3]
    assert all(set(each["contributors"]) == {"node-a", "node-b"} for each in status["fragments"])
    assert status["open_rounds"] == []
    assert {each["name"]: each["missing"] for each in status["barriers"]} == {"done": [], "start": []}
    assert all(each["bytes_up"] > 1000 and each["requests"] > 20 for each in status["learners"])


def test_a_learner_whose_beat_changes_is_there_and_one_whose_beat_stays_is_not(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    algorithm = together(parties=1)
    session, model = join(url, "node-a", algorithm, lease=0.6)
    with session:
        train(session, model, 3)
        box = open_mailbox(url)
        box.put(keys.learner("dead", 1), box.get(keys.learner("node-a", 1)) or b"")
        box.put(keys.beat("dead", 1), encode(Beat(count=7, state="training", interval=0.05)))
        learners = {each["learner_id"]: each for each in shown(command, url)["learners"]}
    assert learners["node-a"]["presence"] == "alive"
    assert learners["node-a"]["state"] == "training"
    assert learners["dead"]["presence"] == "silent"
    assert learners["dead"]["last_seen_s"] > 0.05


def test_silence_is_counted_on_the_watchers_own_clock() -> None:
    life, clock = keys.Life("node-a", 1), ManualClock()
    watch = BeatWatch(clock=clock)
    beat = Beat(count=1, state="training", interval=4.0, at=0.0)
    assert watch.see({life: beat})[life].presence == "unknown"
    clock.advance(9.0)
    assert watch.see({life: beat})[life].presence == "unknown"
    clock.advance(2.0)
    assert watch.see({life: beat})[life].presence == "silent"
    assert watch.see({life: Beat(count=2, state="training", interval=4.0, at=-1e9)})[life].presence == "alive"


def test_open_rounds_barriers_and_queues_are_shown(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, _ = join(url, "node-a", together(parties=1))
    session.close()
    box = open_mailbox(url)
    box.put(keys.contribution(1, 1, "node-b"), b"{}")
    box.put(keys.barrier("half-way", "node-b"), b"")
    queue = SharedQueue("shards", box, "node-a", poll_interval=0.02)
    queue.fill(["x", "y", "z"])
    tasks = queue.tasks()
    next(tasks), next(tasks)
    status = shown(command, url)
    text = command("status", url).stdout
    tasks.close()
    assert status["open_rounds"] == [{"fragment": 1, "version": 1, "contributors": ["node-b"]}]
    assert status["barriers"] == [{"name": "half-way", "arrived": ["node-b"], "missing": ["node-a"]}]
    assert status["queues"] == [{"name": "shards", "progress": {"done": 1, "claimed": 1, "left": 1, "failed": 0}}]
    assert "v1: node-b" in text
    assert "half-way" in text
    assert "shards" in text


def test_a_barrier_waits_for_nobody_once_it_is_open(mailbox_url: str) -> None:
    for name in ("node-a", "node-b"):
        join(mailbox_url, name, together(parties=1))[0].close()
    box = open_mailbox(mailbox_url)
    Barrier(box, "node-a").wait("open", parties=1)
    with pytest.raises(RunTimeout):
        Barrier(box, "node-a").wait("waited for", parties=2, timeout=0)
    box.put(keys.barrier("not ours", "node-a"), b"-1")
    assert {barrier.name: barrier.missing for barrier in read_run(box).barriers} == {
        "open": (),
        "waited for": ("node-b",),
        "not ours": ("node-b",),
    }


def test_queues_with_like_names_are_all_found(mailbox_url: str) -> None:
    session, _ = join(mailbox_url, "node-a", together(parties=1))
    session.close()
    box = open_mailbox(mailbox_url)
    names = ["a", "a-b", "a.c", "a/b", "b", "~"]
    for name in names:
        SharedQueue(name, box, "node-a").fill([1, 2])
    assert sorted(queue.name for queue in read_run(box).queues) == sorted(names)


def test_names_in_the_mailbox_are_no_markup(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, _ = join(url, "node-a", together(parties=1))
    session.close()
    open_mailbox(url).put(keys.barrier("[/red]\x1b[2J[bold]", "node-a"), b"")
    text = command("status", url).stdout
    assert "[/red]" in text
    assert "\x1b[2J" not in text


def test_a_record_that_cannot_be_read_does_not_hide_the_run(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, _ = join(url, "node-a", together(parties=1))
    session.close()
    box = open_mailbox(url)
    box.put(keys.beat("node-a", 1), b"garbage")
    box.put("learners/strange", b"")
    assert [each["state"] for each in shown(command, url, "--wait", "0")["learners"]] == [""]


def test_what_is_no_run_is_said_and_nothing_is_made(command: Command, tmp_path: Path) -> None:
    assert "there is no directory" in command("status", str(tmp_path / "typo"), fails=True).stderr
    assert not (tmp_path / "typo").exists()
    assert "holds no run" in command("status", str(tmp_path), fails=True).stderr
    assert "unknown scheme" in command("status", "gs://bucket/run", fails=True).stderr


def test_a_look_at_the_status_costs_few_requests(finished_run: str) -> None:
    box = CountingMailbox(open_mailbox(finished_run))
    view = read_run(box)
    sightings(box, view.learners, BeatWatch(), longest_s=0)
    assert sum(box.usage.requests.values()) <= 15
    assert set(box.usage.requests) == {"get", "list"}


@pytest.mark.s3
def test_looking_needs_no_right_to_write(command: Command, s3_url: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = join(s3_url, "node-a", together(parties=1))
    session.close()
    for name, value in s3_server.reader_env.items():
        monkeypatch.setenv(name, value)
    assert [each["presence"] for each in shown(command, s3_url)["learners"]] == ["ended"]


def test_the_installed_command_runs_without_torch(finished_run: str) -> None:
    program = "import sys; sys.modules['torch'] = None; sys.argv[0] = 'gradientmail'; from gradientmail_torch.cli import main; main()"
    arguments = [sys.executable, "-c", program, "status", finished_run]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"})
    assert ended.returncode == 0, ended.stderr
    assert "node-a" in ended.stdout
