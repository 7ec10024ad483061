"""Elastic data: three nodes of different speed share the shards of a text, and one of them is killed.

    python examples/elastic_data.py                          # three processes on this machine, a directory as the mailbox
    python examples/elastic_data.py --mailbox s3://bucket/x  # the same over a bucket

Every shard is trained on, whoever is there; the table at the end says who took which. On machines of your own, start
``python examples/elastic_data.py --mailbox … --node node-0`` on each, with a name of its own.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from uuid import uuid4

import torch
from charlm import CharGPT, Windows, read_text
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy
from gradientmail_torch.lightning import SharedQueueDataModule
from gradientmail_torch.patterns.queue import SharedQueue

SHARDS = 12
LENGTH = 64
PAUSE_S = {"node-0": 0.01, "node-1": 0.05, "node-2": 0.1}
"""How long each node dawdles over a batch."""
VICTIM = "node-2"


class TextShards(SharedQueueDataModule):
    """A text in shards of equal length, ``[begin, end)`` each, and a last part of it to validate on."""

    def __init__(self, text: str | None = None, characters: int = 100_000, shards: int = SHARDS, **options: Any) -> None:
        super().__init__(**options)
        self.text = text
        self.characters = characters
        self.shards = shards

    def items(self) -> list[list[int]]:
        borders = [place * self.characters // self.shards for place in range(self.shards + 1)]
        return [list(pair) for pair in pairwise(borders)]

    def load(self, item: list[int]) -> Iterator[Tensor]:
        begin, end = item
        windows = Windows(read_text(self.text)[begin : end + LENGTH], LENGTH, stride=LENGTH // 2)
        return (windows[place] for place in range(len(windows)))

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Windows(read_text(self.text)[self.characters : self.characters + 20_000], LENGTH, stride=LENGTH), 64)


class Dawdles(Callback):
    """Says when a batch was trained on, and takes its time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(f"batch {batch_idx}", flush=True)
        time.sleep(self._seconds)


def node(mailbox: str, name: str) -> None:
    """One node. Nothing but ``datamodule`` tells it from any other Lightning script."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(1, verbose=False)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        strategy=GradientMailStrategy(
            mailbox, learner_id=name, algorithm=DecoupledDiLoCo(sync_every=10, fragments=1),
            start_parties=3, done_parties=2, poll_interval=0.25, lease=4.0,
        ),
        max_epochs=1,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        callbacks=[Dawdles(PAUSE_S.get(name, 0.0))],
    )  # fmt: skip
    data = TextShards(batch_size=16, seed=7, lease=4.0, poll_interval=0.25)
    trainer.fit(CharGPT(width=48, layers=1), datamodule=data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", help="URL of the run's mailbox, or a directory; a temporary one when left out")
    parser.add_argument("--node", help="be this node, instead of starting three")
    options = parser.parse_args()
    if options.node:
        node(options.mailbox, options.node)
    elif options.mailbox:
        prefix, mark, query = options.mailbox.partition("?")
        campaign(f"{prefix.rstrip('/')}/{uuid4().hex[:8]}{mark}{query}")  # a run takes a new prefix
    else:
        with tempfile.TemporaryDirectory() as folder:
            campaign(folder)


def campaign(mailbox: str) -> None:
    """Start three nodes, kill one in the middle of a shard, and count at the end."""
    print(f"mailbox {mailbox}; {VICTIM} will be killed in the middle of its second shard")
    nodes = {name: start(mailbox, name) for name in PAUSE_S}
    try:
        kill_when_busy(nodes[VICTIM])
        for name, process in nodes.items():
            if name != VICTIM and process.wait(timeout=300):
                raise SystemExit(f"{name} ended with exit code {process.returncode}")
    finally:
        for process in nodes.values():
            process.kill()
            process.wait()
    report(mailbox)


def start(mailbox: str, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--mailbox", mailbox, "--node", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE if name == VICTIM else subprocess.DEVNULL, text=True)
    print(f"{name} started")
    return process


def kill_when_busy(victim: subprocess.Popen[str]) -> None:
    """SIGKILL, when it has trained on its first shard and a few batches of its second."""
    assert victim.stdout is not None
    for line in victim.stdout:
        if line == "batch 26\n":  # a shard has 17 batches of 16
            break
    victim.send_signal(signal.SIGKILL)
    print(f"{VICTIM} killed with SIGKILL")
    victim.stdout.close()


def report(mailbox: str) -> None:
    queue = SharedQueue("train-0", mailbox, "reader")
    took: Counter[str] = Counter()
    print("\nshard  trained on by  attempt")
    for outcome in queue.outcomes():
        name = outcome.owner.rpartition("-")[0]
        took[name] += 1
        print(f"{int(outcome.item):5}  {name:13}  {outcome.attempt:7}{'   taken over' if outcome.attempt > 1 else ''}")
    progress = queue.progress()
    shares = ", ".join(f"{name} {took[name]}" for name in sorted(took))
    print(f"\n{progress.done} of {SHARDS} shards done, {progress.failed} given up: {shares}")
    if progress.done != SHARDS or took.total() != SHARDS:
        raise SystemExit("a shard is missing")


if __name__ == "__main__":
    main()
