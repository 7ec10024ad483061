"""Starts the nodes of an example on this machine, as they would be started on several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from places import new_run


def start_nodes(script: Path, nodes: int, mailbox: str) -> int:
    """Run ``script`` once for each rank, on a new run below ``mailbox``, and wait; returns an exit status."""
    mailbox = new_run(mailbox)
    print(f"mailbox: {mailbox}", flush=True)
    shared = [sys.executable, str(script), "--mailbox", mailbox, "--nodes", str(nodes)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    running = [subprocess.Popen([*shared, "--rank", str(rank)], env=environment) for rank in range(nodes)]
    try:
        return max(node.wait() for node in running)
    finally:
        for node in running:
            if node.poll() is None:
                node.terminate()
                node.wait()
