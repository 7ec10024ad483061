"""The process group of a node at the end of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import atexit, sys
import torch.distributed as dist
from gradientmail_torch.lightning.group import end_with_the_process

atexit.register(lambda: print("there" if dist.is_initialized() else "gone"))  # what is registered first comes last
end_with_the_process()  # nothing to end yet
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
for _ in range(int(sys.argv[2])):
    end_with_the_process()
sys.exit(143)
"""


def ended(tmp_path: Path, *, times: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store"), str(times)], capture_output=True, text=True, timeout=100, check=False
    )


def test_a_gloo_group_is_taken_apart_before_the_interpreter_ends(tmp_path: Path) -> None:
    """Else a thread of its may outlive the interpreter, which aborts the process and loses its exit code."""
    done = ended(tmp_path, times=2)
    assert (done.stdout, done.returncode) == ("gone\n", 143), done.stderr


def test_without_it_the_group_is_still_there(tmp_path: Path) -> None:
    assert ended(tmp_path, times=0).stdout == "there\n"
