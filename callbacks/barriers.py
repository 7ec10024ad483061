"""Points of a training loop where nodes wait for each other."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from gradientmail_torch.lightning.alignment import align_together, layout_of_run
from gradientmail_torch.lightning.barrier import wait_together
from gradientmail_torch.lightning.companion import place_of
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.participation import MailboxLike, Participation

log = logging.getLogger(__name__)


class _BarrierCallback(Callback):
    """Waits at named barriers.

    Args:
        parties: nodes that must arrive.
        mailbox, learner_id: when left out, those of the Trainer's GradientMail strategy or callback, and without
            one those of the environment.
        name: a barrier's name serves once per run.
        timeout: seconds; None waits without end.
        poll_interval: seconds between two looks.
    """

    def __init__(
        self,
        parties: int,
        mailbox: MailboxLike | None = None,
        learner_id: str | None = None,
        name: str = "",
        timeout: float | None = None,
        poll_interval: float = 1.0,
    ) -> None:
        # Participation refuses what cannot be, now.
        self._own = Participation(
            mailbox=mailbox, learner_id=learner_id, start_parties=parties, start_timeout=timeout, poll_interval=poll_interval
        )
        self.parties = parties
        self.name = name
        self.timeout = timeout
        self.poll_interval = poll_interval

    def wait(self, trainer: Trainer, name: str) -> list[str]:
        """Wait at barrier ``name``, on every rank of the node; returns the learners that had arrived."""
        place = place_of(trainer, self._own)
        group = Group(trainer.strategy)
        return wait_together(
            group,
            name,
            self.parties,
            self.timeout,
            mailbox=place.open,
            learner_id=group.lead(place.identify),
            poll_interval=self.poll_interval,
            interrupted=place.interrupted,
        )


class StartBarrier(_BarrierCallback):
    """Holds training until ``parties`` nodes are ready to begin."""

    def __init__(
        self,
        parties: int,
        mailbox: MailboxLike | None = None,
        learner_id: str | None = None,
        name: str = "start",
        timeout: float | None = None,
        poll_interval: float = 1.0,
    ) -> None:
        super().__init__(parties, mailbox, learner_id, name, timeout, poll_interval)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.wait(trainer, self.name)


class DoneBarrier(_BarrierCallback):
    """Holds the end of training until ``parties`` nodes have finished, and then loads the run's parameters.

    After ``timeout`` seconds it goes on with those who have arrived, with a warning. ``align=False``, or a mailbox
    without a run (nobody has a session there), leaves the parameters as they are.
    """

    def __init__(
        self,
        parties: int,
        mailbox: MailboxLike | None = None,
        learner_id: str | None = None,
        name: str = "done",
        timeout: float | None = 600.0,
        poll_interval: float = 1.0,
        align: bool = True,
    ) -> None:
        super().__init__(parties, mailbox, learner_id, name, timeout, poll_interval)
        self.align = align

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        try:
            self.wait(trainer, self.name)
        except TimeoutError as error:
            log.warning("going on without those who have not arrived: %s", error)
        group = Group(trainer.strategy)
        mailbox = place_of(trainer, self._own).patiently(group)
        if self.align and layout_of_run(group, mailbox) is not None:
            align_together(pl_module, group, mailbox)


class EpochBarrier(_BarrierCallback):
    """Holds every epoch's start until ``parties`` nodes have reached it: barriers ``epoch-0``, ``epoch-1``, …"""

    def __init__(
        self,
        parties: int,
        mailbox: MailboxLike | None = None,
        learner_id: str | None = None,
        name: str = "epoch",
        timeout: float | None = None,
        poll_interval: float = 1.0,
    ) -> None:
        super().__init__(parties, mailbox, learner_id, name, timeout, poll_interval)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.wait(trainer, f"{self.name}-{trainer.current_epoch}")
