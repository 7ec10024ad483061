"""Trials for the tests: a Lightning fit of a line, and its evaluation at a synchronization node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_torch.patterns.synchronization import SynchronizationNode


class Line(LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def points(begin: int, end: int) -> TensorDataset:
    x = torch.linspace(-1, 1, 64)[begin:end, None]
    return TensorDataset(x, 3 * x + 1)


class Stream(Callback):
    def __init__(self, emit: Callable[[Any], None]) -> None:
        self.emit = emit

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.emit({"epoch": trainer.current_epoch, "loss": loss_of(pl_module, 0, 64)})


def loss_of(model: nn.Module, begin: int, end: int) -> float:
    x, y = points(begin, end).tensors
    with torch.no_grad():
        return float(nn.functional.mse_loss(model.layer(x), y))


def fit_trial(lr: float, _emit: Callable[[Any], None]) -> dict[str, Any]:
    seed_everything(1, verbose=False)
    model = Line(lr)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[Stream(_emit)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(points(0, 64), batch_size=8))
    return {"loss": loss_of(model, 0, 64), "weights": model.state_dict()}


def evaluate(weights: dict[str, Tensor], shard: int, mailbox: str) -> None:
    """Evaluate half of the points and hand the sum in at the synchronization node."""
    model = Line(0.0)
    model.load_state_dict(weights)
    begin = 32 * shard
    meeting(mailbox, f"shard-{shard}").call(f"shard-{shard}", {"sum": 32 * loss_of(model, begin, begin + 32), "points": 32})


def meeting(mailbox: str, learner_id: str) -> SynchronizationNode:
    return SynchronizationNode("evaluate", ["shard-0", "shard-1"], mailbox=mailbox, learner_id=learner_id, run_id="campaign")
