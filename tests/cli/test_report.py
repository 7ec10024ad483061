"""gradientmail report: one page with everything, which asks the network for nothing."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from gradientmail_torch import keys
from gradientmail_torch.cli import charts
from gradientmail_torch.cli.logs import read_logs
from gradientmail_torch.cli.main import app
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.messages import Commit, LeftOut, encode, read
from gradientmail_torch.patterns.queue import SharedQueue
from tests.cli.conftest import Command, join, together


class Page(HTMLParser):
    """What a browser would load, run and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.scripts = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)
        self.scripts += tag == "script" or any(name.startswith("on") for name, _ in attributes)
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value and value[0] != "#"]

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data.strip())
        if self.open and self.open[-1] != "style":
            self.text += data

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass


def page(command: Command, url: str, tmp_path: Path, *options: str) -> Page:
    command("report", url, str(tmp_path / "report.html"), *options)
    return Page((tmp_path / "report.html").read_text())


@pytest.fixture(scope="module")
def text(finished_run: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a finished run."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    assert CliRunner().invoke(app, ["report", finished_run, str(file)]).exit_code == 0
    return file.read_text()


def test_it_shows_who_was_there_what_was_committed_and_what_it_cost(text: str) -> None:
    shown = Page(text)
    assert shown.headings[1:] == [
        *("Learners", "Over time", "Who was there", "Rounds", "Contributors", "Samples committed", "Goodput", "Staleness"),
        *("Bytes", "Requests", "Cost", "Barriers", "Fragments"),
    ]
    assert "node-a" in shown.text
    assert "100.0 %" in shown.text  # goodput: all that was done is in commits
    assert "Cloudflare R2" in shown.text


def test_it_asks_the_network_for_nothing_and_runs_nothing(text: str) -> None:
    shown = Page(text)
    assert [each for each in shown.loads if not each.startswith("data:")] == []
    assert shown.scripts == 0
    assert "default-src 'none'" in text
    assert not re.findall(r"url\(\s*['\"]?(?!#|data:)", text)
    assert len(text) < 600_000


def test_names_in_the_mailbox_are_text_and_nothing_else(command: Command, finished_run: str, tmp_path: Path) -> None:
    url = str(shutil.copytree(finished_run, tmp_path / "mailbox"))
    box = open_mailbox(url)
    box.put(keys.barrier("<script>alert(1)</script>$\\frac{", "node-a"), b"")
    commit = read(box, Commit, keys.commit(0, 3))
    assert commit is not None
    hostile = LeftOut(nonce="", learner_id="<img src=x onerror=alert(1)>", reason="</table><script>")
    merged = tuple(msgspec.structs.replace(each, learner_id="$x_{<b>}$") for each in commit.merged)
    box.put(keys.commit(0, 3), encode(msgspec.structs.replace(commit, left_out=(hostile,), merged=merged)))
    shown = page(command, url, tmp_path)
    assert shown.scripts == 0
    assert "<script>alert(1)</script>" in shown.text
    assert "<img src=x onerror=alert(1)>" in shown.text
    assert "$x_{<b>}$" in shown.text
    assert not {"img", "b"} & set(shown.tags)


def test_pictures_take_their_ink_from_the_page_and_share_no_names(text: str) -> None:
    assert "currentColor" in text
    assert "#000000" not in "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    for picture in re.findall(r"<svg[^>]*>", text):
        assert "width=" not in picture
        assert "viewBox=" in picture


def test_queues_and_open_rounds_are_on_it(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, _ = join(url, "node-a", together(parties=1))
    session.close()
    box = open_mailbox(url)
    queue = SharedQueue("shards", box, "node-a", poll_interval=0.02)
    queue.fill([1, 2, 3, 4])
    tasks = queue.tasks()
    next(tasks), next(tasks)
    box.put(keys.contribution(0, 1, "node-b"), b"{}")
    shown = page(command, url, tmp_path)
    tasks.close()
    assert "width: 25.0%" in (tmp_path / "report.html").read_text()
    assert "v1: node-b" in shown.text


class TestLogs:
    def test_losses_of_lightnings_csv_and_of_json_lines_are_drawn(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        csv = tmp_path / "node-a" / "version_0" / "metrics.csv"
        csv.parent.mkdir(parents=True)
        csv.write_text("step,train_loss,val_loss,gradientmail/staleness_steps\n1,2.5,,\n2,2.25,,3\n3,,2.0,\n4,,1.5,1\n")
        lines = tmp_path / "node-b.jsonl"
        lines.write_text("\n".join(json.dumps({"event": "step", "step": n, "loss": 3.0 / n, "at": 1.0}) for n in (1, 2, 3)))
        shown = page(command, finished_run, tmp_path, "--log", str(csv), "--log", f"second={lines}")
        assert {"Validation loss", "Training loss (mean of 10)", "Staleness of each node"} <= set(shown.headings)
        assert "second" in shown.text

    def test_logs_of_one_name_are_told_apart(self, tmp_path: Path) -> None:
        files = [tmp_path / "out" / version / "metrics.csv" for version in ("version_0", "version_1")]
        for file in files:
            file.parent.mkdir(parents=True)
            file.write_text("step,loss\n1,2.5\n")
        assert [*read_logs([str(file) for file in files])] == ["out", str(files[1])]
        with pytest.raises(ConfigError, match="give them as NAME=FILE"):
            read_logs([str(files[0])] * 3)

    def test_a_log_that_cannot_be_read_is_named(self, command: Command, finished_run: str, tmp_path: Path) -> None:
        (tmp_path / "bad.jsonl").write_text("{")
        for name in ("bad.jsonl", "none.csv"):
            said = command("report", finished_run, str(tmp_path / "r.html"), "--log", str(tmp_path / name), fails=True).stderr
            assert name in said
            assert "metrics.csv or one JSON object a line" in said

    def test_a_log_that_begins_anew_does_not_draw_a_line_back(self) -> None:
        xs, ys = charts._pieces([(1, 4.0), (2, 2.0), (1, 8.0)], smooth=2)
        assert [x for x in xs if x == x] == [1, 2, 1]
        assert [y for y in ys if y == y] == [4.0, 3.0, 8.0]
        assert len(xs) == 4


@pytest.mark.parametrize("count", [1, 2, 11])
def test_any_number_of_series_makes_a_picture(count: int) -> None:
    series = {f"learner-with-a-long-name-{place}": [(0.0, 1.0), (1.0, 2.0)] for place in range(count)}
    for svg in (charts.lines(series, x="x", y="y"), charts.dots(series, x="x", y="y"), charts.areas(series, x="x", y="y")):
        assert svg.startswith("<svg")
        assert ("learner-wi…long-name-0" in svg) is (1 < count <= charts.MOST_NAMED)


def test_a_run_without_a_commit_has_a_page(command: Command, tmp_path: Path) -> None:
    url = str(tmp_path / "mailbox")
    session, _ = join(url, "node-a", together(parties=1))
    session.close()
    assert "Who was there" in page(command, url, tmp_path).headings
