"""Scoring the run's parameters instead of the node's own."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from gradientmail_torch.algorithms.layout import travelling
from gradientmail_torch.callbacks.barriers import align_node
from gradientmail_torch.lightning.companion import required_companion
from gradientmail_torch.lightning.participation import MailboxLike, Participation


class AlignOnValidation(Callback):
    """Validates the committed parameters of the run; the node's own are put back afterwards.

    ``mailbox`` is that of the Trainer's GradientMail strategy or callback when left out; with one given it also
    works in ``trainer.validate``. Callbacks that swap weights for validation themselves (EMA) must come first.
    """

    def __init__(self, mailbox: MailboxLike | None = None) -> None:
        self._own = Participation(mailbox=mailbox) if mailbox is not None else None
        self._local: dict[str, Tensor] = {}

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        part = self._own or required_companion(trainer, "AlignOnValidation").participation
        self._local = {name: tensor.clone() for name, tensor in travelling(pl_module).items()}
        align_node(trainer, pl_module, part)

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        local, self._local = self._local, {}
        tensors = travelling(pl_module) if local else {}
        for name, value in local.items():
            tensors[name].copy_(value)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)
