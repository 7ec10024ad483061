"""gradientmail replay: who contributed what, and the commits made again from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gradientmail_torch import DecoupledDiLoCo, keys
from gradientmail_torch.algorithms import Algorithm, OuterSGD
from gradientmail_torch.cli.run_view import read_run
from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.messages import Commit, LeftOut, encode, read
from tests.cli.conftest import FINISHED, Command, join, run_together, together, train


def replayed(command: Command, url: str, *options: str, fails: bool = False) -> Any:
    return json.loads(command("replay", url, "--json", *options, fails=fails).stdout)


def test_each_commit_names_its_contributors_with_their_share(command: Command, finished_run: str) -> None:
    shown = replayed(command, finished_run)
    assert sorted((commit["fragment"], commit["version"]) for commit in shown["commits"]) == [(f, v) for f in (0, 1) for v in (1, 2, 3)]
    for commit in shown["commits"]:
        assert {each["learner_id"] for each in commit["contributions"]} == {"node-a", "node-b"}
        assert [each["share"] for each in commit["contributions"]] == [0.5, 0.5]
        assert [each["behind"] for each in commit["contributions"]] == [0, 0]


def test_totals_are_the_steps_that_each_learner_made(command: Command, finished_run: str) -> None:
    totals = {each["learner_id"]: each for each in replayed(command, finished_run)["totals"]}
    assert {name: (each["steps"], each["samples"]) for name, each in totals.items()} == {"node-a": (6, 48), "node-b": (6, 48)}
    assert sum(each["merged"] for each in totals.values()) == 6


def test_what_was_left_out_is_shown_with_its_reason(command: Command, finished_run: str, tmp_path: Path) -> None:
    url = shutil.copytree(finished_run, tmp_path / "mailbox")
    box = open_mailbox(url)
    commit = read(box, Commit, keys.commit(0, 3))
    assert commit is not None
    left_out = (LeftOut(nonce="", learner_id="node-c", reason="tensor 'w' is not finite"),)
    box.put(keys.commit(0, 3), encode(_changed(commit, left_out=left_out)))
    assert "node-c" in command("replay", str(url)).stdout
    (shown,) = [each["left_out"] for each in replayed(command, str(url))["commits"] if each["left_out"]]
    assert "tensor 'w' is not finite" in str(shown)


def _changed(commit: Commit, **fields: Any) -> Commit:
    return msgspec.structs.replace(commit, **fields)


class TestVerify:
    @pytest.mark.parametrize(
        "algorithm",
        [
            FINISHED,
            together(merge="rda", wire="fp32"),
            together(outer=OuterSGD(), wire="int8", commit_wire="int8", whole_every=16),
        ],
        ids=["momentum, bf16 updates", "rda, whole commits", "int8 updates"],
    )
    def test_every_commit_of_a_kept_run_comes_out_bit_for_bit(self, command: Command, tmp_path: Path, algorithm: Algorithm) -> None:
        url = str(tmp_path / "mailbox")
        run_together(url, algorithm, steps=6)
        assert replayed(command, url, "--verify")["verified"] == [
            {"fragment": fragment, "from_version": 0, "to_version": 3, "problem": ""} for fragment in (0, 1)
        ]

    def test_decoupled_rounds_come_out_bit_for_bit(self, command: Command, tmp_path: Path) -> None:
        url = str(tmp_path / "mailbox")
        algorithm = DecoupledDiLoCo(sync_every=1, fragments=2)
        sessions = [join(url, name, algorithm) for name in ("node-a", "node-b")]
        for session, model in sessions:
            train(session, model, 5)
        for session, _ in sessions:
            session.close()
        for found in replayed(command, url, "--verify")["verified"]:
            assert found["problem"] == ""
            assert found["to_version"] >= 1
            assert found["from_version"] == 0

    def test_a_commit_that_its_contributions_do_not_make_is_named(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        url = shutil.copytree(finished_run, tmp_path / "mailbox")
        box = open_mailbox(url)
        commit = read(box, Commit, keys.commit(1, 2))
        assert commit is not None
        first, second = commit.merged
        box.put(keys.commit(1, 2), encode(_changed(commit, merged=(first, msgspec.structs.replace(second, weight=second.weight * 2)))))
        found = {each["fragment"]: each for each in replayed(command, str(url), "--verify", fails=True)["verified"]}
        assert found[0]["problem"] == ""
        assert "version 2" in found[1]["problem"]
        assert "than it has offered" in command("replay", str(url), "--verify", fails=True).stdout

    def test_where_contributions_are_gone_it_begins_behind_them(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        url = shutil.copytree(finished_run, tmp_path / "mailbox")
        box = open_mailbox(url)
        commit = read(box, Commit, keys.commit(0, 1))
        assert commit is not None
        box.delete(commit.merged[0].data.key)
        found = {each["fragment"]: each for each in replayed(command, str(url), "--verify")["verified"]}
        # Its own value was made of an update, which is there still.
        assert (found[0]["from_version"], found[0]["to_version"], found[0]["problem"]) == (1, 3, "")
        assert found[1]["from_version"] == 0
        assert "versions 2 to 3 made again" in command("replay", str(url), "--verify").stdout

    def test_where_all_are_gone_it_says_so(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        url = shutil.copytree(finished_run, tmp_path / "mailbox")
        box = open_mailbox(url)
        for commit in read_run(box, history=True).commits:
            for merged in commit.merged:
                box.delete(merged.data.key)
        assert "nothing to compare" in command("replay", str(url), "--verify").stdout
