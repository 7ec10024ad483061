"""Distributed evaluation: three nodes score one model, each its share of the data, and one of them is killed.

    python examples/distributed_evaluation.py                          # three processes here, a directory as the mailbox
    python examples/distributed_evaluation.py --mailbox s3://bucket/x  # the same over a bucket

Every node gets the same numbers, and they are those that one process gets alone, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from typing import Any
from uuid import uuid4

import torch
from charlm import CharGPT, Windows, read_text
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from gradientmail_torch.callbacks.evaluation import evaluate_together
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.patterns.queue import SharedQueue

PIECES = 24
NODES = ("node-0", "node-1", "node-2")
VICTIM = "node-2"


class Scored(CharGPT):
    """The demo's model, with an accuracy beside the loss. The victim says that it has begun, and hangs."""

    def __init__(self, hangs_at_batch: int | None = None) -> None:
        super().__init__(width=48, layers=1)
        self.accuracy = MulticlassAccuracy(256, average="micro")
        self.hangs_at_batch = hangs_at_batch
        self.batches = 0

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.batches == self.hangs_at_batch:
            print("in the middle of a piece", flush=True)
            time.sleep(3600)
        self.batches += 1
        super().validation_step(batch, batch_idx)
        self.accuracy.update(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("accuracy", self.accuracy)


def evaluate(mailbox: str, name: str, hangs_at_batch: int | None = None) -> dict[str, float]:
    """What every node calls, with the same parameters: here, those of one seed."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    model = Scored(hangs_at_batch)
    windows = Windows(read_text()[:200_000], length=64, stride=64)
    loader = DataLoader(windows, batch_size=16)
    return evaluate_together(
        model, loader, name="final", mailbox=mailbox, learner_id=name, pieces=PIECES, timeout=300, lease=4.0, poll_interval=0.25
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", help="URL of a mailbox, or a directory; a temporary one when left out")
    parser.add_argument("--node", help="be this node, instead of starting three")
    options = parser.parse_args()
    if options.node:
        Barrier(options.mailbox, options.node, poll_interval=0.1).wait("ready", parties=len(NODES), timeout=300)
        print(json.dumps(evaluate(options.mailbox, options.node, hangs_at_batch=3 if options.node == VICTIM else None)))
    elif options.mailbox:
        prefix, mark, query = options.mailbox.partition("?")
        campaign(f"{prefix.rstrip('/')}/{uuid4().hex[:8]}{mark}{query}")
    else:
        with tempfile.TemporaryDirectory() as folder:
            campaign(folder)


def campaign(mailbox: str) -> None:
    """Start three nodes, kill one in the middle of a piece, and compare with one process alone."""
    print(f"mailbox {mailbox}; {VICTIM} will be killed in the middle of a piece")
    nodes = {name: start(mailbox, name) for name in NODES}
    try:
        kill_when_busy(nodes[VICTIM])
        found = {name: numbers(process) for name, process in nodes.items() if name != VICTIM}
    finally:
        for process in nodes.values():
            process.kill()
            process.communicate()
    scored = Counter(outcome.owner.rpartition("-")[0] for outcome in SharedQueue("evaluation final", mailbox, "reader").outcomes())
    print(f"{scored.total()} of {PIECES} pieces scored: {', '.join(f'{name} {scored[name]}' for name in sorted(scored))}")
    with tempfile.TemporaryDirectory() as folder:
        found["one process"] = evaluate(folder, "alone")
    for name, values in found.items():
        print(f"{name:12} {'  '.join(f'{key} {value!r}' for key, value in values.items())}")
    if len({json.dumps(values) for values in found.values()}) != 1 or scored.total() != PIECES:
        raise SystemExit("the numbers differ")
    print("the same numbers everywhere, to the last bit")


def start(mailbox: str, name: str) -> subprocess.Popen[str]:
    print(f"{name} started")
    return subprocess.Popen([sys.executable, __file__, "--mailbox", mailbox, "--node", name], stdout=subprocess.PIPE, text=True)


def kill_when_busy(victim: subprocess.Popen[str]) -> None:
    assert victim.stdout is not None
    if victim.stdout.readline() != "in the middle of a piece\n":
        raise SystemExit(f"{VICTIM} got nothing to do: the others were too fast")
    victim.send_signal(signal.SIGKILL)
    print(f"{VICTIM} killed with SIGKILL")


def numbers(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=300)
    if process.returncode:
        raise SystemExit(f"a node ended with exit code {process.returncode}")
    return dict(json.loads(output))


if __name__ == "__main__":
    main()
