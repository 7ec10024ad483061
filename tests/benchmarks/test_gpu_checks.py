"""The checks on a device, as far as they can be seen without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_checks


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_is_said_why_nothing_is_checked() -> None:
    assert "no CUDA device" in gpu_checks.run()["skipped"]


def test_a_node_of_one_process_under_ddp_ends_with_the_runs_parameters() -> None:
    program = "import json; from benchmarks.gpu_checks import ddp_with_one_process as check; print(json.dumps(check('cpu')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1])["holds"]
