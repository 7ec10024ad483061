"""A run's figures among the Trainer's metrics."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradientmail_torch.lightning.companion import companion_of
from gradientmail_torch.session import Stats


class RoundMonitor(Callback):
    """Writes the session's figures to the Trainer's loggers every ``log_every_n_steps`` steps and at the end.

    ========================================= ===============================================================
    ``gradientmail/round``                    newest version that this node has adopted, of any fragment
    ``gradientmail/learners``                 live learners in training
    ``gradientmail/contributed``              contributions of this node that are in a commit
    ``gradientmail/staleness_steps``          own steps on the oldest base that has something newer on its way
    ``gradientmail/discarded_steps``          own steps that are in no commit and never will be
    ``gradientmail/stall_ms_per_step``        time that the training thread lost to the session
    ``gradientmail/bytes_up``, ``bytes_down`` through the mailbox so far
    ``gradientmail/requests``                 to the mailbox so far, of all kinds
    ========================================= ===============================================================

    The part before the slash is a section in TensorBoard and in Weights & Biases. What W&B can sort and filter runs by has
    letters, digits and underscores alone: ``prefix="gradientmail_"`` gives that.
    """

    def __init__(self, prefix: str = "gradientmail/") -> None:
        self._prefix = prefix
        self._logged_at_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._logged_at_step = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        companion = companion_of(trainer)
        # Not trainer.global_step, which grows by two in a batch with two optimizers.
        if companion is not None and companion.steps - self._logged_at_step >= trainer.log_every_n_steps:  # type: ignore[attr-defined]
            self._log(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        companion = companion_of(trainer)
        if companion is None or (stats := companion.stats) is None:
            return
        self._logged_at_step = companion.steps
        metrics = {self._prefix + name: value for name, value in figures(stats).items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)  # as Lightning's own


def figures(stats: Stats) -> dict[str, float]:
    return {
        "round": max(stats.versions, default=0),
        "learners": stats.learners,
        "contributed": stats.tally.merged,
        "staleness_steps": stats.staleness_steps,
        "discarded_steps": stats.tally.discarded_work.steps,
        "stall_ms_per_step": 1e3 * stats.stall_seconds / max(1, stats.steps),
        "bytes_up": stats.usage.bytes_up,
        "bytes_down": stats.usage.bytes_down,
        "requests": sum(stats.usage.requests.values()),
    }
