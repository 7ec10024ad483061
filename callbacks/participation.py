"""Taking part in a run with any strategy."""

from __future__ import annotations

import logging
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from gradientmail_torch.lightning.companion import Companion
from gradientmail_torch.lightning.participation import MailboxLike, Participation

log = logging.getLogger(__name__)


class GradientMailCallback(Companion):
    """Takes part in a run around ``fit``, for those who keep their own strategy. Put it first in the list.

    Args:
        mailbox: URL of the run's mailbox, or a Mailbox.
        participation: any field of :class:`~gradientmail_torch.lightning.participation.Participation`:
            ``learner_id``, ``algorithm``, ``start_parties``, ``done_parties``, …

    What only a strategy can do stays with you: under DDP give the distributed sampler a seed of this learner's
    own (:func:`~gradientmail_torch.lightning.seeding.learner_seed`), and do not share a launcher between nodes.
    """

    def __init__(self, mailbox: MailboxLike | None = None, **participation: Any) -> None:
        super().__init__(Participation(mailbox=mailbox, **participation))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.callbacks[0] is not self:  # type: ignore[attr-defined]
            log.warning("GradientMailCallback is not the first callback: those before it see parameters from before the exchange")
