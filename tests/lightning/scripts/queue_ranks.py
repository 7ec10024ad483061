"""Two ranks of one node that train on the items of a queue: writes down which samples each rank saw,
and what they make of an evaluation.

torchrun --standalone --nproc-per-node=2 queue_ranks.py DIRECTORY [WORKERS]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from gradientmail_torch import GradientMailDDPStrategy
from gradientmail_torch.callbacks import DistributedEvaluation
from gradientmail_torch.lightning.datamodule import SharedQueueDataModule


class Ranges(SharedQueueDataModule):
    def items(self) -> list[list[int]]:
        return [[start, start + 7] for start in range(0, 35, 7)]

    def load(self, item: list[int]) -> Iterator[Tensor]:
        return (torch.tensor(number) for number in range(*item))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches.append(batch.tolist())
        return self.layer(batch.float().unsqueeze(1)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("mean", batch.float().mean(), batch_size=len(batch))
        self.log("batches", 1.0, reduce_fx="sum")

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.arange(23), batch_size=2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def main() -> None:
    directory = Path(sys.argv[1])
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    strategy: Any = GradientMailDDPStrategy(str(directory / "box"), learner_id="node", poll_interval=0.1)
    evaluation = DistributedEvaluation(every_n_epochs=2, pieces=4, poll_interval=0.1)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, num_sanity_val_steps=0, callbacks=[evaluation],
    )  # fmt: skip
    model = Module()
    trainer.fit(model, datamodule=Ranges(batch_size=2, num_workers=workers, poll_interval=0.1, seed=5))
    (directory / f"{trainer.global_rank}.json").write_text(json.dumps({"batches": model.batches, "metrics": evaluation.metrics}))


if __name__ == "__main__":
    main()
