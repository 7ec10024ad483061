"""Scoring the run's parameters on all nodes together."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.lightning.companion import place_of
from gradientmail_torch.lightning.evaluation import evaluate_together
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.participation import MailboxLike, Participation
from gradientmail_torch.lightning.sharing import run_parameters
from gradientmail_torch.lightning.signals import InterruptibleClock

__all__ = ["DistributedEvaluation", "evaluate_together"]


class DistributedEvaluation(Callback):
    """Evaluates on all nodes, each its share, so that every node gets the metrics that one alone would get.

    At the end of training it scores the module as it is then: use it with ``done_parties`` of the strategy or with a
    :class:`DoneBarrier` before it, after which all nodes have the run's parameters. With ``every_n_epochs`` it also scores
    the run's committed parameters at the end of epochs: the node that gets there first publishes them, and all who
    come while they are scored take their share; nobody waits for nodes that are not there.

    See :func:`~gradientmail_torch.lightning.evaluation.evaluate_together` for what counts. The results are in
    :attr:`metrics`, in ``trainer.callback_metrics`` and at the loggers, under their names with ``prefix`` before.

    Args:
        mailbox, learner_id: when left out, those of the Trainer's GradientMail strategy or callback, and without one
            those of the environment.
        name: of the evaluations; with the epoch it serves once per run.
        every_n_epochs: also at the end of every so many epochs.
        pieces: into how many the validation data is cut, the same on all nodes; up to 64 when left out.
        timeout: seconds to wait for pieces that other nodes hold.
        lease: seconds without a sign of life after which a node's piece goes to others.
    """

    def __init__(
        self,
        mailbox: MailboxLike | None = None,
        learner_id: str | None = None,
        name: str = "evaluation",
        every_n_epochs: int | None = None,
        pieces: int | None = None,
        prefix: str = "run_",
        timeout: float | None = 600.0,
        lease: float = 60.0,
        poll_interval: float = 1.0,
    ) -> None:
        if every_n_epochs is not None and (isinstance(every_n_epochs, bool) or not isinstance(every_n_epochs, int) or every_n_epochs < 1):
            raise ConfigError(f"every_n_epochs must be None or a whole number of at least 1, not {every_n_epochs!r}")
        self._own = Participation(mailbox=mailbox, learner_id=learner_id)
        self._name = name
        self._every_n_epochs = every_n_epochs
        self._pieces = pieces
        self._prefix = prefix
        self._times: dict[str, Any] = {"timeout": timeout, "lease": lease, "poll_interval": poll_interval}
        self.metrics: dict[str, float] = {}
        """The newest results, without prefix."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every = self._every_n_epochs
        if every is None or (trainer.current_epoch + 1) % every or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        place, name = self._place(trainer), f"{self._name}-{trainer.current_epoch}"
        with run_parameters(pl_module, name=name, **place, **self._times):
            found = self._evaluate(trainer, pl_module, name, place)
        pl_module.log_dict({self._prefix + key: value for key, value in found.items()}, rank_zero_only=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        found = self._evaluate(trainer, pl_module, f"{self._name}-end", self._place(trainer))
        named = {self._prefix + key: value for key, value in found.items()}
        trainer.callback_metrics.update({key: torch.tensor(value, dtype=torch.float64) for key, value in named.items()})
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)

    def _evaluate(self, trainer: Trainer, pl_module: LightningModule, name: str, place: dict[str, Any]) -> dict[str, float]:
        loader = validation_loader(trainer, pl_module)
        self.metrics = evaluate_together(
            pl_module, loader, name=name, pieces=self._pieces, strategy=trainer.strategy, **place, **self._times
        )
        return self.metrics

    def _place(self, trainer: Trainer) -> dict[str, Any]:
        """Where the node meets the others, on every rank of it."""
        place, group = place_of(trainer, self._own), Group(trainer.strategy)
        return {
            "mailbox": place.open() if group.leads else None,
            "learner_id": group.lead(place.identify),
            "lead": group.lead,
            "clock": InterruptibleClock(place.interrupted),
        }


def validation_loader(trainer: Trainer, pl_module: LightningModule) -> DataLoader[Any]:
    """The one loader of the validation data."""
    found: Any = trainer.val_dataloaders
    if found is None:  # with limit_val_batches=0 Lightning does not ask whoever has it
        source = trainer.fit_loop.epoch_loop.val_loop._data_source  # loaders given to fit, a datamodule, or the module
        found = source.dataloader() if source.is_defined() else pl_module.val_dataloader()
    if isinstance(found, (list, tuple)) and len(found) == 1:
        (found,) = found
    if not isinstance(found, DataLoader):
        raise ConfigError(f"a distributed evaluation needs one DataLoader of validation data, not {type(found).__name__}")
    return found
