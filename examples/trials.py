"""What the nodes of the steering campaign run: a Lightning fit of one trial, and the evaluation of a part of the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from charlm import CharGPT, TextData, Windows, read_text
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from gradientmail_torch.patterns.synchronization import SynchronizationNode

LENGTH = 64
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Reports(Callback):
    """Streams the validation loss to the Thinker, who may cancel the trial for it."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._emit({"step": trainer.global_step, "loss": float(trainer.callback_metrics["val_loss"])})


def fit_trial(lr: float, width: int, steps: int, every: int, _emit: Callable[[Any], None]) -> dict[str, Any]:
    """Train a model of ``width`` for ``steps`` steps. Returns its loss on a part of the validation text, and its weights."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    model = CharGPT(width=width, lr=lr)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        val_check_interval=every,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        callbacks=[Reports(_emit)],
        **QUIET,
    )
    trainer.fit(model, datamodule=TextData(length=LENGTH))
    return {"loss": float(trainer.callback_metrics["val_loss"]), "weights": model.state_dict()}


def evaluate(weights: dict[str, Tensor], width: int, shard: int, shards: int, mailbox: str, campaign: str) -> None:
    """Evaluate a share of the validation text, and hand it in at the synchronization node."""
    torch.set_num_threads(1)
    model = CharGPT(width=width)
    model.load_state_dict(weights)
    model.eval()
    text = read_text()
    windows = Windows(text[len(text) * 95 // 100 :], LENGTH, stride=LENGTH)
    mine = torch.utils.data.Subset(windows, range(shard, len(windows), shards))
    with torch.no_grad():
        total = sum(float(model.loss(batch)) * len(batch) for batch in DataLoader(mine, 64))
    name = f"shard-{shard}"
    meeting(mailbox, campaign, shards, name).call(name, {"loss": total, "windows": len(mine)})


def meeting(mailbox: str, campaign: str, shards: int, learner_id: str) -> SynchronizationNode:
    """Where the parts of the evaluation come together."""
    parts = [f"shard-{shard}" for shard in range(shards)]
    return SynchronizationNode("evaluate the best", parts, mailbox=mailbox, learner_id=learner_id, run_id=campaign)
