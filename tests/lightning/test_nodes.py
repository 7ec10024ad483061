"""Nodes in processes of their own, launched as on rented machines, that meet in a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gradientmail_torch import open_mailbox
from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.session.run import Run

SCRIPT = Path(__file__).parent / "scripts" / "node.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
PATIENCE_S = 150.0

pytestmark = pytest.mark.timeout(300)


class Launched:
    """A running node and what it has written."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process = process
        self.directory = directory

    @property
    def output(self) -> str:
        return (self.directory / "output").read_text()

    def until(self, holds: Callable[[], Any]) -> None:
        """Wait until something holds; a node that ends before is a failure that shows its output."""
        deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
        while not holds():
            assert self.process.poll() is None, self.output
            assert SYSTEM_CLOCK.monotonic() < deadline, f"it takes too long:\n{self.output}"
            SYSTEM_CLOCK.sleep(0.05)

    def pid(self, rank: int = 0) -> int:
        """Process ID of a rank, once it trains."""
        mark = self.directory / f"training-{rank}"
        self.until(mark.exists)
        return int(mark.read_text())

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def report(self) -> dict[str, Any]:
        assert self.exit_code() == 0, self.output
        return json.loads((self.directory / "report.json").read_text())


@pytest.fixture
def launch(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Launched]]:
    with ExitStack() as running:

        def start(learner_id: str, *options: str, launcher: tuple[str, ...] = ()) -> Launched:
            return running.enter_context(launched(tmp_path, environment, learner_id, launcher, options))

        yield start


@contextmanager
def launched(
    tmp_path: Path, environment: dict[str, str], learner_id: str, launcher: tuple[str, ...], options: tuple[str, ...]
) -> Iterator[Launched]:
    directory = tmp_path / learner_id
    directory.mkdir()
    command = [sys.executable, *launcher, str(SCRIPT), str(directory), str(tmp_path / "mailbox"), learner_id, *options]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield Launched(process, directory)
    finally:
        for rank in directory.glob("training-?"):  # torchrun's workers have sessions of their own
            _kill(int(rank.read_text()))
        _kill(-process.pid)
        process.wait()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def newest_version(tmp_path: Path) -> int:
    run = Run.open(open_mailbox(tmp_path / "mailbox"))
    assert run is not None
    return run.newest_version(0)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_two_nodes_start_alike_train_on_samples_of_their_own_and_end_with_the_same_score(launch: Callable[..., Launched]) -> None:
    """The validation after fit scores the run's parameters: the same number on both, to the last digit."""
    nodes = [launch(name, "--epochs=4", "--parties=2") for name in ("a", "b")]
    a, b = (node.report() for node in nodes)
    assert a["first"] == b["first"]
    assert a["seen"] != b["seen"]
    assert a["final"] == b["final"]
    assert repr(a["val_loss"]) == repr(b["val_loss"])


def test_sigterm_to_one_rank_ends_its_node_with_143_and_the_others_go_on(launch: Callable[..., Launched], tmp_path: Path) -> None:
    """Lightning alone hangs when one rank of two is told to stop."""
    several, alone = launch("several", "--devices=2", launcher=TORCHRUN), launch("alone")
    ranks = [several.pid(0), several.pid(1)]
    alone.pid()
    os.kill(ranks[1], signal.SIGTERM)
    assert several.exit_code() != 0
    assert "exitcode  : 143" in several.output
    assert all(is_gone(pid) for pid in ranks)

    before = newest_version(tmp_path)
    alone.until(lambda: newest_version(tmp_path) > before + 2)
    os.kill(alone.pid(), signal.SIGTERM)
    assert alone.exit_code() == 143


def test_ctrl_c_ends_a_node_whose_ranks_lightning_has_launched(launch: Callable[..., Launched]) -> None:
    """A terminal sends it to all processes at once."""
    node = launch("node", "--devices=2")
    ranks = [node.pid(0), node.pid(1)]
    os.killpg(node.process.pid, signal.SIGINT)
    assert node.exit_code() == 1
    node_of_launcher = node.process.pid
    assert all(is_gone(pid) for pid in (*ranks, node_of_launcher))


def test_an_exception_on_one_rank_ends_the_node(launch: Callable[..., Launched]) -> None:
    node = launch("node", "--devices=2", "--failing-rank=1", launcher=TORCHRUN)
    assert node.exit_code() != 0
    assert "ZeroDivisionError" in node.output
    assert "node is leaving the run after" in node.output
