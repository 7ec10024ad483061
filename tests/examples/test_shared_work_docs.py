"""The code in docs/queue-and-synchronization.md runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "queue-and-synchronization.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_runs(number: int, tmp_path: Path) -> None:
    environment, command = {**os.environ, "OMP_NUM_THREADS": "1"}, [sys.executable, "-c", BLOCKS[number]]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    promised = re.findall(r"print\(.*\) +# (Progress\(.*\))", BLOCKS[number])
    assert all(line in done.stdout for line in promised)
