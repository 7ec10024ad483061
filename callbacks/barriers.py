"""Points of a training loop where nodes wait for each other."""

from __future__ import annotations

import logging

from lightning.pytorch import Callback, LightningModule, Trainer

from gradientmail_torch.lightning.barrier import NodeBarrier
from gradientmail_torch.lightning.companion import required_companion
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.parameters import access_for
from gradientmail_torch.lightning.participation import MailboxLike, Participation
from gradientmail_torch.session import align

log = logging.getLogger(__name__)


class _BarrierCallback(Callback):
    """Waits at named barriers.

    Args:
        parties: nodes that must arrive.
        mailbox, learner_id: those of the Trainer's GradientMail strategy or callback, when left out.
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
        Participation(start_parties=parties, learner_id=learner_id)  # refuses bad values now
        self.parties = parties
        self.name = name
        self.timeout = timeout
        self.poll_interval = poll_interval
        self._own = Participation(mailbox=mailbox, learner_id=learner_id) if mailbox is not None or learner_id is not None else None

    def participation(self, trainer: Trainer) -> Participation:
        return self._own or required_companion(trainer, type(self).__name__).participation

    def wait(self, trainer: Trainer, name: str) -> list[str]:
        """Wait at barrier ``name``; returns the learners that had arrived."""
        part = self.participation(trainer)
        group = Group(trainer.strategy)
        learner_id = group.lead(part.identify)
        barrier = NodeBarrier(group, part.open, learner_id, poll_interval=self.poll_interval)
        return barrier.wait(name, self.parties, self.timeout)


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

    After ``timeout`` seconds it goes on with those who have arrived, with a warning.
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
        if self.align:
            align_node(trainer, pl_module, self.participation(trainer))


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


def align_node(trainer: Trainer, pl_module: LightningModule, part: Participation) -> None:
    """Load the run's committed parameters into the model on every rank of this node."""
    group = Group(trainer.strategy)
    access = access_for(pl_module, group, fragments=part.algorithm.fragments, buffers=part.algorithm.buffers)
    group.lead(lambda: align(pl_module, mailbox=part.open(), access=access))
