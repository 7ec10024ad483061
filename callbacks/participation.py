"""Taking part in a run with any strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo
from gradientmail_torch.lightning.companion import Companion
from gradientmail_torch.lightning.participation import MailboxLike, Participation

log = logging.getLogger(__name__)


class GradientMailCallback(Companion):
    """Takes part in a run around ``fit``, for those who keep their own strategy. Put it first in the list.

    The arguments are those of :class:`~gradientmail_torch.lightning.GradientMailStrategy`.

    What only a strategy can do stays with you: under DDP give the distributed sampler a seed of this learner's
    own (:func:`~gradientmail_torch.lightning.seeding.learner_seed`), and do not share a launcher between nodes.
    """

    def __init__(
        self,
        mailbox: MailboxLike | None = None,
        algorithm: Algorithm | None = None,
        learner_id: str | None = None,
        start_parties: int | None = None,
        done_parties: int | None = None,
        start_timeout: float | None = None,
        done_timeout: float | None = 600.0,
        align: bool = True,
        reseed: bool = True,
        exchange_every: int = 1,
        batch_size: Callable[[Any], int] | None = None,
        lease: float = 30.0,
        poll_interval: float = 1.0,
        outage_timeout: float = 600.0,
        step_timeout: float = 600.0,
        keep: int | None = 4,
        keep_seconds: float = 60.0,
        close_timeout: float = 600.0,
        leave_timeout: float = 10.0,
    ) -> None:
        super().__init__(
            Participation(
                mailbox=mailbox,
                algorithm=algorithm or DecoupledDiLoCo(),
                learner_id=learner_id,
                start_parties=start_parties,
                done_parties=done_parties,
                start_timeout=start_timeout,
                done_timeout=done_timeout,
                align=align,
                reseed=reseed,
                exchange_every=exchange_every,
                batch_size=batch_size,
                lease=lease,
                poll_interval=poll_interval,
                outage_timeout=outage_timeout,
                step_timeout=step_timeout,
                keep=keep,
                keep_seconds=keep_seconds,
                close_timeout=close_timeout,
                leave_timeout=leave_timeout,
            )
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.callbacks[0] is not self:  # type: ignore[attr-defined]
            log.warning("GradientMailCallback is not the first callback: those before it see parameters from before the exchange")
