"""A LightningDataModule whose training items the nodes of a run share."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.lightning.companion import companion_of, place_of
from gradientmail_torch.lightning.data import SharedQueueDataset, SharedQueueLoader
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.participation import MailboxLike, Participation
from gradientmail_torch.lightning.signals import InterruptibleClock
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.patterns.queue import SharedQueue


class SharedQueueDataModule(LightningDataModule):
    """Trains on items that the nodes of a run share; every epoch hands all of them out once.

    Subclass it: :meth:`items` lists them, the same on every node, and :meth:`load` turns one into samples. Whatever
    ranks and DataLoader workers a node has, see :class:`SharedQueueLoader`. The nodes end an epoch at different times,
    when every item is done on whichever node, and meet at the done barrier.

    A node that resumes from a checkpoint in the middle of an epoch goes on with what is left of the epoch: items that
    are done are not handed out again, items that it held when it ended are.

    Args:
        batch_size: samples in a batch of one rank.
        mailbox, learner_id: those of the Trainer's GradientMail strategy or callback, when left out.
        name: of the queues: ``{name}-0`` for the first epoch, and so on. A name serves once per run.
        seed: hand the items out in random order, another one each epoch; in the order of :meth:`items` when left out.
        num_workers, prefetch_items, pin_memory: see :class:`SharedQueueLoader`.
        lease: seconds without a sign of life after which a node's items go to others.
        max_attempts: tries that an item gets on nodes that die.
        drain: wait at the end for the items that others hold, to take over a dead node's.
        poll_interval, outage_timeout: see :class:`~gradientmail_torch.patterns.queue.SharedQueue`.
    """

    def __init__(
        self,
        batch_size: int = 1,
        mailbox: MailboxLike | None = None,
        learner_id: str | None = None,
        name: str = "train",
        seed: int | None = None,
        num_workers: int = 0,
        prefetch_items: int = 1,
        pin_memory: bool = False,
        lease: float = 60.0,
        poll_interval: float = 1.0,
        max_attempts: int = 5,
        drain: bool = True,
        outage_timeout: float = 600.0,
    ) -> None:
        super().__init__()
        self._own = Participation(mailbox=mailbox, learner_id=learner_id)
        self._name = name
        self._seed = seed
        self._queue_options: dict[str, Any] = {
            "lease": lease,
            "poll_interval": poll_interval,
            "max_attempts": max_attempts,
            "drain": drain,
            "outage_timeout": outage_timeout,
        }
        self._loader_options: dict[str, Any] = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "prefetch_items": prefetch_items,
            "pin_memory": pin_memory,
        }

    def items(self) -> Sequence[Any]:
        """What there is to train on, as JSON values: names of files, ranges, …; the same on every node."""
        raise NotImplementedError(f"{type(self).__name__} must say what its items are")

    def load(self, item: Any) -> Iterable[Any]:
        """The samples of an item, in an order that is the same everywhere. Runs in the worker processes if there are any."""
        raise NotImplementedError(f"{type(self).__name__} must say what the samples of an item are")

    def train_dataloader(self) -> SharedQueueLoader:
        group = Group(self._fitting.strategy)
        light = copy.copy(self)  # what travels to worker processes
        light.trainer = None
        return SharedQueueDataset(self._queue, light.load).loader(**self._loader_options, lead=group.lead)

    def queue(self, epoch: int) -> SharedQueue:
        """The queue of an epoch, filled."""
        trainer = self._fitting
        companion = companion_of(trainer)
        clock = SYSTEM_CLOCK if companion is None else InterruptibleClock(lambda: companion.termination.due)
        place = place_of(trainer, self._own)
        # What never joins the run, fast_dev_run and the tuner's trials, takes nothing from the others either.
        on_trial = trainer.fast_dev_run or (companion is None and hasattr(trainer.strategy, "participation"))  # type: ignore[attr-defined]
        mailbox = MemoryMailbox() if on_trial else place.open()
        queue = SharedQueue(f"{self._name}-{epoch}", mailbox, place.identify(), clock=clock, **self._queue_options)
        queue.fill(self.items(), seed=None if self._seed is None else self._seed + epoch)
        return queue

    def _queue(self) -> SharedQueue:
        return self.queue(self._fitting.current_epoch)

    @property
    def _fitting(self) -> Trainer:
        if self.trainer is None:
            raise ConfigError(f"{type(self).__name__} belongs to no Trainer yet: give it to trainer.fit(model, datamodule=…)")
        return self.trainer
