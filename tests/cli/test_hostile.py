"""Every verb on mailboxes that are broken or lie: it shows what it can, or says what is wrong in one message."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradientmail_torch.cli.main import app

VERBS = (
    ("status", "--wait", "0"),
    ("status", "--json", "--wait", "0"),
    ("cost",),
    ("cost", "--json"),
    ("replay",),
    ("replay", "--json"),
    ("replay", "--verify"),
    ("gc", "--show"),
    ("report", "out.html"),
    ("export", "out.safetensors"),
)
Harm = Callable[[Path], None]


def rewritten(pattern: str, **fields: Any) -> Harm:
    """Whoever can write to the mailbox can write any figure."""

    def harm(mailbox: Path) -> None:
        for file in [*mailbox.glob(pattern)]:
            file.write_text(json.dumps({**json.loads(file.read_bytes()), **fields}))

    return harm


def cut_off(mailbox: Path) -> None:
    for file in mailbox.rglob("*"):
        if file.is_file() and "data" not in file.parts:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(folder: str) -> Harm:
    return lambda mailbox: shutil.rmtree(mailbox / folder)


def foreign(mailbox: Path) -> None:
    names = ("barriers/x", "queues/%/manifest", "steering/.DS_Store", "steering/a/results/x/y", "steering/%ff/requests/a/b")
    names += ("sync/a/workflow/manifest", "sync/%/node/b/claims/%zz/000001", "learners/a/b/c/d", "rounds/0/a/b", "commits/0/zz", "beats/x")
    for name in names:
        (mailbox / name).parent.mkdir(parents=True, exist_ok=True)
        (mailbox / name).write_bytes(b"not ours")


HARMS: dict[str, Harm] = {
    "objects cut off": cut_off,
    "foreign objects": foreign,
    "no data": without("data"),
    "no commits": without("commits"),
    "no fragments": rewritten("run.json", layout=[], initial=[]),
    "founded at the end of time": rewritten("run.json", founded_at=1e300),
    "commits before the beginning of time": rewritten("commits/*/*", at=-1e308),
    "commits at the end of time": rewritten("commits/*/*", at=1e308),
    "figures as large as they get": rewritten(
        "beats/*/*", at=1e308, seconds=1e-320, interval=1e300, stall_seconds=1e308, seconds_per_step=1e-320, steps=2**53, bytes_up=2**53
    ),
}


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.parametrize("harm", HARMS)
def test_no_verb_breaks_on_it(finished_run: str, tmp_path: Path, harm: str, verb: tuple[str, ...]) -> None:
    mailbox = shutil.copytree(finished_run, tmp_path / "mailbox")
    HARMS[harm](mailbox)
    name, *rest = verb
    arguments = [str(tmp_path / argument) if argument.startswith("out.") else argument for argument in rest]
    result = CliRunner().invoke(app, [name, str(mailbox), *arguments], env={"COLUMNS": "200"})
    assert result.exception is None or isinstance(result.exception, SystemExit), f"{result.output}\n{result.exception!r}"


@pytest.mark.parametrize(("verb", "out"), [("report", "out.html"), ("export", "out.safetensors")])
def test_a_file_that_cannot_be_written_is_named(finished_run: str, tmp_path: Path, verb: str, out: str) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, [verb, finished_run, str(tmp_path / "file" / out)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert str(tmp_path / "file") in result.output
