"""The docs: every code block runs, every verb is on the page of the command, and Sphinx builds it without a warning."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from gradientmail_torch.cli.main import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUN = "s3://bucket/run-1"
"""Stands for the URL of a run in the pages."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


RUN_FROM_A_FILE = {"steering"}
"""Pages whose programs start processes that read them from a file: tests/examples runs those."""


def with_blocks(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(blocks(page, language) for language in languages)]


@pytest.fixture
def run_url(finished_run: str, tmp_path: Path) -> str:
    return str(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in with_blocks("python") if page.stem not in RUN_FROM_A_FILE], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path, run_url: str, tmp_path: Path) -> None:
    program = "\n".join(blocks(page, "python")).replace(RUN, run_url)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.parametrize("page", with_blocks("bash"), ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page: Path, run_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "bash"):
        assert subprocess.run(["bash", "-n"], input=block, text=True, timeout=30).returncode == 0
        for line in block.splitlines():
            if line.startswith("gradientmail ") and line != "gradientmail demo":  # that takes minutes: tests/test_wheel.py
                result = CliRunner().invoke(app, shlex.split(line.replace(RUN, run_url))[1:])
                assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.mark.parametrize("page", with_blocks("json", "yaml"), ids=lambda page: page.stem)
def test_the_data_of_a_page_can_be_read(page: Path) -> None:
    for block in blocks(page, "json"):
        json.loads(block)
    for block in blocks(page, "yaml"):
        yaml.safe_load(block)


def test_blocks_are_of_languages_that_are_checked() -> None:
    for page in PAGES:
        languages = set(re.findall(r"^```(\S+)$", page.read_text(), re.M))
        assert languages <= {"python", "bash", "json", "yaml", "text", "{toctree}"}, page.name


def test_the_page_of_the_command_has_every_verb_and_no_other() -> None:
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    page = (DOCS / "command.md").read_text()
    assert set(re.findall(r"^\| `(\w+)`", page, re.M)) == verbs
    assert set(re.findall(r"^gradientmail (\w+)", page, re.M)) == verbs


def test_pictures_are_there_and_load_nothing() -> None:
    for page in PAGES:
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            assert (DOCS / name).exists(), f"{page.name}: {name}"
    for picture in DOCS.rglob("*.svg"):
        assert set(re.findall(r"https?://[^\"' )]+", picture.read_text())) <= {"http://www.w3.org/2000/svg"}, picture.name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sphinx_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "-q",
        "-E",
        "-b",
        "html",
        "-d",
        str(tmp_path / "trees"),
        str(DOCS),
        str(tmp_path / "html"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    text = (tmp_path / "html" / "api" / "session.html").read_text()
    assert "never waits for the network" in re.sub(r"\s+", " ", text)
