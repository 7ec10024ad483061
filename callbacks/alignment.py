"""Scoring the run's parameters instead of the node's own."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from gradientmail_torch.algorithms.model_tensors import tensors_of
from gradientmail_torch.lightning.alignment import align_together, layout_of_run
from gradientmail_torch.lightning.companion import place_of
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.parameters import reshard
from gradientmail_torch.lightning.participation import MailboxLike, Participation


class AlignOnValidation(Callback):
    """Validates the committed parameters of the run; the node's own are put back afterwards.

    A ModelCheckpoint that is due after a validation saves the node's own, which are not those that its ``monitor`` has
    scored. Callbacks that swap weights for validation themselves (EMA) score theirs. ``trainer.validate`` with a
    ``ckpt_path`` scores that checkpoint.

    Args:
        mailbox: when left out, that of the Trainer's GradientMail strategy or callback, and without one that of the
            environment. With one given it also works in ``trainer.validate`` under any strategy.
    """

    def __init__(self, mailbox: MailboxLike | None = None) -> None:
        self._own = Participation(mailbox=mailbox)
        self._local: list[tuple[Tensor, Tensor]] = []
        """Tensors of the model, and what they held."""

    @torch.no_grad()
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if trainer.state.fn == TrainerFn.VALIDATING and trainer.ckpt_path is not None:
            return  # that is what was asked for
        reshard(pl_module)
        group, place = Group(trainer.strategy), place_of(trainer, self._own)
        mailbox = place.patiently(group)
        layout = layout_of_run(group, mailbox) or ()
        self._local = [(tensor, tensor.clone()) for fragment in tensors_of(pl_module, layout) for tensor in fragment]
        align_together(pl_module, group, mailbox)

    @torch.no_grad()
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._local:
            reshard(pl_module)
        for tensor, held in self._local:
            tensor.copy_(held)
        self._local = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_validation_end(trainer, pl_module)
