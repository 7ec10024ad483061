"""The demo leaves nothing behind when it is stopped, and removes nothing that is not its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
LOOK_S = 0.1


def until(holds: Callable[[], bool], *, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(LOOK_S)


def alive(pid: int) -> bool:
    """A process that runs; one that has ended and is not waited for yet does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def started(out: Path) -> list[int]:
    """The processes of the nodes that train."""
    lines = [line for file in out.glob("*.jsonl") for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [event["pid"] for event in map(json.loads, lines) if event["event"] == "start"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda stop: stop.name)
def test_its_nodes_end_with_it(tmp_path: Path, stop: signal.Signals) -> None:
    (tmp_path / "text").write_text("All that glitters is not gold. " * 300)
    command = [sys.executable, str(DEMO), "--out", str(tmp_path / "demo"), "--text", str(tmp_path / "text"), "--steps", "100000"]
    heeds = partial(signal.signal, stop, signal.SIG_DFL)  # also where the tests run under nohup, or in the background of a shell
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=heeds) as demo:
        try:
            until(lambda: len(started(tmp_path / "demo")) >= 2)
        finally:
            os.kill(demo.pid, stop)
    assert demo.returncode != 0
    until(lambda: not any(map(alive, started(tmp_path / "demo"))))


def test_a_link_leads_to_the_folder_that_is_used_and_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEMO.parent)
    from places import empty

    folder, link, file = tmp_path / "folder", tmp_path / "link", tmp_path / "file"
    link.symlink_to(folder)
    for _ in range(2):
        empty(link)
        (folder / "from the last time").touch()
    empty(link)
    assert link.is_symlink()
    assert not (folder / "from the last time").exists()
    file.touch()
    with pytest.raises(SystemExit, match="is a file"):
        empty(file)
    assert file.exists()
