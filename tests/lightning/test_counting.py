"""Steps that a gradient scaler skips are no steps, and the samples behind them are in no contribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from tiny import Tiny, digest, numbers, quiet_trainer

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy
from gradientmail_torch.lightning.counting import WorkCounter

Node = Callable[..., GradientMailStrategy]

OVERFLOWING = (1, 4, 5)
"""Batches whose gradients are infinite."""


class Overflowing(Tiny):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.moved: list[bool] = []
        """For each batch, whether the parameters have really changed."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.before = digest(self)
        return self.loss(batch) * (math.inf if batch_idx in OVERFLOWING else 1.0)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.moved.append(digest(self) != self.before)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, **self.options)


class ByHand(Overflowing):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


@pytest.mark.parametrize("fused", [False, True], ids=["not fused", "fused"])
@pytest.mark.parametrize("model", [Overflowing, ByHand])
def test_skipped_steps_do_not_count(node: Node, model: type[Overflowing], fused: bool) -> None:
    module = model(fused=fused)
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    strategy = node(algorithm=DecoupledDiLoCo(sync_every=100))  # nothing else moves the parameters
    trainer = quiet_trainer(strategy=strategy, plugins=[precision])
    trainer.fit(module, numbers(32, batch_size=4))
    assert module.moved == [batch not in OVERFLOWING for batch in range(8)]
    assert strategy.stats is not None
    assert (strategy.stats.steps, strategy.stats.samples) == (5, 20)


def test_a_scale_that_grows_is_no_skipped_step(node: Node) -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1))
    strategy = node()
    quiet_trainer(strategy=strategy, plugins=[precision]).fit(Tiny(), numbers(32, batch_size=4))
    assert precision.scaler is not None
    assert precision.scaler.get_scale() > 1.0
    assert strategy.stats is not None
    assert strategy.stats.steps == 8


def test_hooks_are_taken_back(node: Node) -> None:
    """A second fit with the same optimizers counts each step once."""
    model = Tiny()
    strategy = node()
    trainer = quiet_trainer(strategy=strategy)
    trainer.fit(model, numbers())
    (optimizer,) = trainer.optimizers
    assert not optimizer._optimizer_step_post_hooks
    counter = WorkCounter(trainer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    counter.close()
    assert not optimizer._optimizer_step_post_hooks
