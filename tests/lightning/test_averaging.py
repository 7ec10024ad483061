"""Averaging callbacks write their parameters over the node's: what the run gets are the training weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from tiny import Tiny, digest, numbers, quiet_trainer
from torch import nn

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy, align
from gradientmail_torch.mailbox import Mailbox

Node = Callable[..., GradientMailStrategy]


class Records(Callback):
    """The last parameters that an optimizer step has made."""

    def __init__(self) -> None:
        self.trained: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        if not trainer.fit_loop._skip_backward:
            self.trained = {name: parameter.detach().clone() for name, parameter in pl_module.named_parameters()}


class Scores(Callback):
    """The parameters that validations have scored."""

    def __init__(self) -> None:
        self.scored: list[str] = []

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        self.scored.append(digest(pl_module))


def difference(model: nn.Module, other: dict[str, torch.Tensor]) -> float:
    return max(float((parameter.detach() - other[name]).abs().max()) for name, parameter in model.named_parameters())


def test_ema_keeps_its_average_and_the_run_gets_the_training_weights(node: Node, mailbox: Mailbox) -> None:
    model, run = Tiny(), Tiny()
    records, scores = Records(), Scores()
    trainer = quiet_trainer(strategy=node(), max_epochs=3, callbacks=[records, EMAWeightAveraging(decay=0.9), scores])
    trainer.fit(model, numbers(), numbers(shuffle=False))
    align(run, mailbox=mailbox)
    assert difference(run, records.trained) < 1e-5
    assert difference(model, records.trained) > 1e-3
    assert digest(run) not in scores.scored


@pytest.mark.parametrize("middle", [nn.Tanh, lambda: nn.BatchNorm1d(3)], ids=["without batch norm", "with batch norm"])
def test_swa_keeps_its_average_and_the_run_gets_the_training_weights(node: Node, mailbox: Mailbox, middle: Callable[[], nn.Module]) -> None:
    """With BatchNorm, SWA puts its average in before a last epoch that only refreshes the statistics."""
    model, run = Tiny(middle=middle()), Tiny(middle=middle())
    records = Records()
    algorithm = DecoupledDiLoCo(sync_every=2, fragments=1, wire="fp32", commit_wire="fp32")
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)
    strategy = node(algorithm=algorithm)
    trainer = quiet_trainer(strategy=strategy, max_epochs=4, callbacks=[records, averaging])
    trainer.fit(model, numbers())
    align(run, mailbox=mailbox)
    assert strategy.stats is not None
    assert strategy.stats.steps == 32
    assert difference(run, records.trained) < 1e-5
    assert difference(model, records.trained) > 1e-3
