"""The steering campaign runs from one command, with a node that joins late and one that is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_campaign_tries_everything_and_evaluates_the_best(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "examples" / "steering_campaign.py", "--out", tmp_path / "out", "--trials", "5", "--steps", "24"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "node-2 boots now and joins" in done.stdout
    rows = re.findall(r"│ +(\d\.\d+e-\d+) │ +(\d+) │ +(\d+) │ +(\S+) │ +(done|cancelled) │ +node-\d │", done.stdout)
    assert len(rows) == 5
    assert any(state == "done" and steps == "24" for _, _, steps, _, state in rows)
    assert re.search(r"All nodes together find a loss of \d\.\d+ on the whole text", done.stdout)
    assert (tmp_path / "out" / "campaign.png").read_bytes().startswith(b"\x89PNG")
