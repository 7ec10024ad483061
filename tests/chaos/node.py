"""One node: Lightning trains the demo's model, made small, at a steady pace, until a file says that it is enough."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
from charlm import CharGPT, TextData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy

FRAGMENTS = 2
BATCH = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mailbox", required=True)
    parser.add_argument("--learner-id", required=True)
    parser.add_argument("--parties", type=int, required=True)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--stop", type=Path, required=True, help="training ends when this file exists")
    parser.add_argument("--lease", type=float, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    return parser.parse_args()


class Reports(Callback):
    """Writes a line for each thing that happens, and keeps the pace: four nodes share this machine and should not notice."""

    def __init__(self, file: TextIO, stop: Path, step_s: float) -> None:
        self._file = file
        self._stop = stop
        self._step_s = step_s
        self._next_at = 0.0
        self._samples = 0
        self.write("start")

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.time(), "pid": os.getpid(), **values}) + "\n")
        self._file.flush()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._samples += len(batch)
        self.write("step", steps=trainer.global_step, samples=self._samples, loss=round(float(outputs["loss"]), 4))
        now = time.monotonic()
        self._next_at = max(self._next_at + self._step_s, now)
        threading.Event().wait(self._next_at - now)
        if self._stop.exists():
            trainer.should_stop = True


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    with options.events.open("a") as file:
        reports = Reports(file, options.stop, options.step_seconds)
        strategy = GradientMailStrategy(
            options.mailbox,
            learner_id=options.learner_id,
            algorithm=DecoupledDiLoCo(sync_every=20, fragments=FRAGMENTS, max_grace=5.0),
            start_parties=options.parties,
            done_parties=options.parties,
            poll_interval=0.25,
            lease=options.lease,
            keep_seconds=10.0,
            close_timeout=300.0,
        )
        trainer = Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_steps=-1, max_epochs=-1, callbacks=[reports], logger=False,
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        )  # fmt: skip
        model = CharGPT(width=64, layers=1)
        trainer.fit(model, TextData(batch_size=BATCH))
        digest = hashlib.sha256()
        for _, tensor in sorted(model.state_dict().items()):
            digest.update(tensor.contiguous().numpy().tobytes())
        assert strategy.stats is not None
        reports.write("end", stats=asdict(strategy.stats), digest=digest.hexdigest())


if __name__ == "__main__":
    main()
