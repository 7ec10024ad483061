"""gradientmail gc: what goes, what stays, and that the run goes on without what went."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from gradientmail_torch import keys
from gradientmail_torch.cli.run_view import read_run
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from tests.cli.conftest import FINISHED, Command, join, run_together, together, train


def held(box: Mailbox) -> set[str]:
    return set(box.list(""))


@pytest.fixture
def ended(finished_run: str, tmp_path: Path) -> str:
    """A run of three versions that has ended, with litter."""
    url = str(shutil.copytree(finished_run, tmp_path / "mailbox"))
    box = open_mailbox(url)
    box.put(keys.initial("ab" * 16, 0), b"of a founder that came second")
    box.put(keys.PROBES + "left", b"of a learner that died while opening")
    box.put(keys.data(0, 2, "node-z", "cd" * 16, "delta"), b"of a learner that died before its record")
    return url


def test_it_deletes_nothing_unless_told(command: Command, ended: str) -> None:
    before = held(open_mailbox(ended))
    said = command("gc", ended, "--keep", "1", "--show").stdout
    assert "add --delete" in said
    assert "node-z" in said
    assert held(open_mailbox(ended)) == before


def test_what_is_left_is_the_newest_versions_and_every_commit(command: Command, ended: str, tmp_path: Path) -> None:
    before = held(open_mailbox(ended))
    command("export", ended, str(tmp_path / "before.pt"))
    command("gc", ended, "--keep", "1", "--delete")
    after = held(open_mailbox(ended))
    gone = before - after
    assert {key for key in gone if "node-z" in key or key.startswith((keys.PROBES, keys.initial("ab" * 16, 0)))} == {
        key for key in before if "node-z" in key or key.startswith((keys.PROBES, keys.initial("ab" * 16, 0)))
    }
    assert not {key for key in gone if key.startswith((keys.COMMITS, keys.LEARNERS, keys.BEATS, keys.BARRIERS, keys.RUN))}
    assert any(key.startswith(keys.data_prefix(0)) for key in gone)
    assert any(key.startswith(keys.ROUNDS) for key in gone)
    command("export", ended, str(tmp_path / "after.pt"))
    exported = [torch.load(tmp_path / name, weights_only=True) for name in ("before.pt", "after.pt")]
    assert all(torch.equal(exported[0][name], value) for name, value in exported[1].items())
    assert "nothing to delete" in command("gc", ended, "--keep", "1", "--delete").stdout


def test_learners_go_on_from_what_is_left(command: Command, ended: str) -> None:
    command("gc", ended, "--keep", "1", "--delete")
    run_together(ended, FINISHED, steps=2)
    assert [fragment.version for fragment in read_run(open_mailbox(ended)).fragments] == [4, 4]


def test_while_a_learner_is_there_nothing_young_is_taken(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, model = join(url, "node-a", together(parties=1), lease=0.6)
    box = open_mailbox(url)
    with session:
        train(session, model, 4)
        unrecorded = keys.data(0, 3, "node-b", "cd" * 16, "delta")
        box.put(unrecorded, b"an upload under way")
        said = command("gc", url, "--keep", "2", "--delete").stdout
        assert "learners are there" in said
        assert box.get(unrecorded) is not None
        train(session, model, 2)
    assert session.versions == (3, 3)


def test_what_is_no_run_is_left_alone(command: Command, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("x")
    assert "holds no run" in command("gc", str(tmp_path), "--delete", fails=True).stderr
    assert (tmp_path / "data" / "mine").exists()


def test_at_least_the_newest_version_stays(command: Command, ended: str) -> None:
    assert command("gc", ended, "--keep", "0", fails=True).exit_code == 2
