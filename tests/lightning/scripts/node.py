"""A node as people start it: trains, and writes down what it began and ended with. Started by python or by torchrun."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from tiny import ALGORITHM, QUICK, Tiny, digest, numbers, quiet_trainer

from gradientmail_torch import GradientMailDDPStrategy, GradientMailStrategy


class Marks(Callback):
    """Leaves a file with the process ID once it trains, and fails where it is told to."""

    def __init__(self, directory: Path, failing_rank: int | None) -> None:
        self._directory = directory
        self._failing_rank = failing_rank

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        mark = self._directory / f"training-{trainer.global_rank}"
        if not mark.exists():
            mark.with_suffix(".part").write_text(str(os.getpid()))
            mark.with_suffix(".part").rename(mark)
        if trainer.global_rank == self._failing_rank and trainer.global_step == 5:
            raise ZeroDivisionError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("mailbox")
    parser.add_argument("learner_id")
    parser.add_argument("--epochs", type=int, default=-1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--parties", type=int)
    parser.add_argument("--failing-rank", type=int)
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    seed_everything(42, verbose=False)
    model = Tiny()
    kind = GradientMailStrategy if options.devices == 1 else GradientMailDDPStrategy
    strategy = kind(
        options.mailbox,
        ALGORITHM,
        options.learner_id,
        start_parties=options.parties,
        done_parties=options.parties,
        leave_timeout=5.0,
        **QUICK,
    )
    marks = Marks(options.directory, options.failing_rank)
    trainer = quiet_trainer(strategy=strategy, devices=options.devices, max_epochs=options.epochs, callbacks=[marks])
    trainer.fit(model, numbers())
    (scores,) = trainer.validate(model, numbers(shuffle=False), verbose=False)
    report = {"first": model.first, "seen": model.seen, "final": digest(model), "val_loss": scores["val_loss"]}
    (options.directory / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
