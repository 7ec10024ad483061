"""The benchmark of steering runs, all its places included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_queue_and_server_is_measured_beside_colmena(tmp_path: Path) -> None:
    out = tmp_path / "steering.json"
    command = [sys.executable, "-m", "benchmarks.steering_latency", "--tasks", "3", "--rounds", "1", "--out", out]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert len(found["places"]) == 5
    assert all(rounds[0]["one_by_one"]["nothing"]["median_ms"] > 0 for rounds in found["places"].values())
    assert found["requests_per_task_on_s3"] >= 5
