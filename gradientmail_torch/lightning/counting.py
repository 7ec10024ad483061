"""Optimizer steps and the samples behind them, counted right.

``trainer.global_step`` is not the number of parameter updates: it grows with every optimizer of a batch, with
steps that a gradient scaler skipped, and not at all where a raw optimizer is stepped by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch.optim import Optimizer

from gradientmail_torch.errors import ConfigError


class WorkCounter:
    """Counts a step for each batch in which any of the module's optimizers really stepped."""

    def __init__(self, trainer: Trainer, batch_size: Callable[[Any], int] | None = None) -> None:
        self._batch_size = batch_size
        self._replicas = _replicas(trainer)
        self._stepped = False
        self._gathered = 0
        self.steps = 0
        self.samples = 0
        """Over all replicas of the node."""
        self.total_steps = 0
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in trainer.strategy.optimizers]
        self._handles = [optimizer.register_step_post_hook(self._note) for optimizer in optimizers]
        # A fused optimizer skips inside its kernel, and its hook fires all the same.
        self._fused = any(group.get("fused") for optimizer in optimizers for group in optimizer.param_groups)
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scale = self._scaler.get_scale() if self._scaler is not None else 0.0

    def batch_ended(self, batch: Any) -> None:
        """Count a batch's samples, and a step when one was made of it and those before it.

        The samples of a step that a gradient scaler skipped are in no step.
        """
        self._gathered += self._replicas * self._size(batch)
        overflowed = self._overflowed()
        stepped, self._stepped = self._stepped, False
        if stepped and not (overflowed and self._fused):
            self.steps += 1
            self.total_steps += 1
            self.samples += self._gathered
        if stepped or overflowed:
            self._gathered = 0

    def take(self) -> tuple[int, int]:
        """Steps since the last call, and the samples behind them."""
        taken = (self.steps, self.samples)
        self.steps = self.samples = 0
        return taken

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped = True

    def _overflowed(self) -> bool:
        """Whether the gradient scaler has met infinite gradients, and so lowered its scale, since the last call."""
        if self._scaler is None:
            return False
        before, self._scale = self._scale, self._scaler.get_scale()
        return bool(self._scale < before)

    def _size(self, batch: Any) -> int:
        if self._batch_size is not None:
            return self._batch_size(batch)
        try:
            return extract_batch_size(batch)
        except (MisconfigurationException, RecursionError) as error:
            raise ConfigError("cannot tell the number of samples in a batch: pass batch_size=<function of the batch>") from error


def _replicas(trainer: Trainer) -> int:
    """Replicas of the model on this node that train on samples of their own: fewer than ranks under tensor parallelism."""
    sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(sampler["num_replicas"]) if sampler else 1
