"""One node of a run: a Lightning Trainer with a GradientMailStrategy, and nothing else that is special.

Start it on each machine, whenever the machine is up::

    torchrun --standalone --nproc-per-node=1 examples/train.py --mailbox s3://bucket/run-1 --learner-id node-0

Several nodes may be started on one machine, with a directory as the mailbox.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from charlm import CharGPT, TextData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy
from gradientmail_torch.callbacks import AlignOnValidation, GradientMailProgressBar


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", help="URL of the run's mailbox, or a directory; none trains alone")
    parser.add_argument("--learner-id", default="alone", help="this node's name in the run")
    parser.add_argument("--seed", type=int, default=1, help="of the initial parameters; shuffling is each learner's own")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of this node")
    parser.add_argument("--sync-every", type=int, default=20, help="steps between two contributions")
    parser.add_argument("--fragments", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--start-parties", type=int, help="nodes to wait for before the first step")
    parser.add_argument("--done-parties", type=int, help="nodes to wait for before the run's parameters are scored")
    parser.add_argument("--poll-interval", type=float, default=0.25)
    parser.add_argument("--lease", type=float, default=6.0)
    parser.add_argument("--validate-every", type=int, default=0, help="steps between two validations of the run's parameters")
    parser.add_argument("--text", help="a file to train on instead of Python's help topics")
    parser.add_argument("--events", type=Path, help="write one JSON line for each thing that happens to this file")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    return parser.parse_args()


class Events(Callback):
    """Writes what happens as JSON lines: for the demo's progress display and plot."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._samples = 0
        self.write("start", pid=os.getpid(), program=str(Path(__file__).resolve()))

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")
        self._file.flush()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._samples += len(batch)
        self.write("step", step=trainer.global_step, samples=self._samples, loss=round(float(outputs["loss"]), 4))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.write("validation", samples=self._samples, loss=float(trainer.callback_metrics["val_loss"]))


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    seed_everything(options.seed, verbose=False)
    model = CharGPT()
    callbacks: list[Callback] = [] if options.quiet else [GradientMailProgressBar()]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = "auto" if processes == 1 else "ddp"
    if options.mailbox:
        strategy = GradientMailStrategy(
            options.mailbox,
            learner_id=options.learner_id,
            algorithm=DecoupledDiLoCo(sync_every=options.sync_every, fragments=options.fragments),
            start_parties=options.start_parties,
            done_parties=options.done_parties,
            poll_interval=options.poll_interval,
            lease=options.lease,
        )
        callbacks.append(AlignOnValidation())
    events = Events(options.events.open("a")) if options.events else None
    if events is not None:
        callbacks.append(events)
    trainer = Trainer(
        accelerator="auto",
        devices=processes,
        strategy=strategy,
        max_steps=options.steps,
        callbacks=callbacks,
        val_check_interval=options.validate_every or options.steps + 1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=not options.quiet,
    )
    data = TextData(options.text, batch_size=options.batch_size)
    began = time.monotonic()
    trainer.fit(model, data)
    seconds = time.monotonic() - began
    (scores,) = trainer.validate(model, data, verbose=False)
    stats = asdict(strategy.stats) if options.mailbox and strategy.stats else {}
    print(f"{options.learner_id}: validation loss of the {'run' if options.mailbox else 'model'} {scores['val_loss']!r}")
    if events is not None:
        events.write("end", steps=trainer.global_step, val_loss=scores["val_loss"], seconds=seconds, stats=stats)


if __name__ == "__main__":
    main()
