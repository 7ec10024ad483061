"""Whatever Lightning does around an optimizer step, the session hears of each step once, with the samples behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny import Tiny, digest, numbers, quiet_trainer
from torch import nn

from gradientmail_torch import GradientMailStrategy, align
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Commit
from gradientmail_torch.session.run import Run

Node = Callable[..., GradientMailStrategy]


def committed(mailbox: Mailbox) -> list[list[Commit]]:
    """The commits of each fragment, in order."""
    run = Run.open(mailbox)
    assert run is not None
    found = []
    for fragment in range(len(run.layout)):
        commits = []
        while (commit := run.commit(fragment, len(commits) + 1)) is not None:
            commits.append(commit)
        found.append(commits)
    return found


def work_in_run(mailbox: Mailbox) -> set[tuple[int, int]]:
    """Steps and samples that are in the commits: one pair where every fragment holds the same."""
    return {
        (sum(m.steps for c in commits for m in c.merged), sum(m.samples for c in commits for m in c.merged))
        for commits in committed(mailbox)
    }


def same_as_run(model: nn.Module, mailbox: Mailbox) -> bool:
    """Whether ``model`` holds the run's committed parameters, to the last bit."""
    fresh = type(model)()
    align(fresh, mailbox=mailbox)
    return digest(fresh) == digest(model)


def test_each_batch_is_a_step_and_all_of_them_are_in_the_run(node: Node, mailbox: Mailbox) -> None:
    model = Tiny()
    strategy = node()
    quiet_trainer(strategy=strategy, max_epochs=2).fit(model, numbers(32, batch_size=4))
    assert strategy.stats is not None
    assert (strategy.stats.steps, strategy.stats.samples) == (16, 64)
    assert work_in_run(mailbox) == {(16, 64)}
    assert same_as_run(model, mailbox)


@pytest.mark.parametrize("exchange_every", [1, 3, 100])
def test_steps_between_two_exchanges_are_reported_together(node: Node, mailbox: Mailbox, exchange_every: int) -> None:
    quiet_trainer(strategy=node(exchange_every=exchange_every)).fit(Tiny(), numbers())
    assert work_in_run(mailbox) == {(8, 32)}


def test_accumulated_batches_are_one_step(node: Node, mailbox: Mailbox) -> None:
    """The last batches of an epoch make a step, however few they are."""
    quiet_trainer(strategy=node(), accumulate_grad_batches=3).fit(Tiny(), numbers(32, batch_size=4))
    assert work_in_run(mailbox) == {(3, 32)}


def test_batches_that_are_not_full_count_what_they_hold(node: Node, mailbox: Mailbox) -> None:
    quiet_trainer(strategy=node()).fit(Tiny(), numbers(10, batch_size=4))
    assert work_in_run(mailbox) == {(3, 10)}


class Manual(Tiny):
    automatic_optimization = False

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.raw = raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=not self.raw)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@pytest.mark.parametrize("raw", [False, True], ids=["lightning's optimizer", "raw optimizer"])
def test_manual_optimization_counts_where_lightning_does_not(node: Node, mailbox: Mailbox, raw: bool) -> None:
    trainer = quiet_trainer(strategy=node())
    trainer.fit(Manual(raw), numbers(32, batch_size=4))
    assert trainer.global_step == (0 if raw else 8)
    assert work_in_run(mailbox) == {(8, 32)}


class SteppedSeldom(Manual):
    """Steps by hand at every fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch) / 4)
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_manual_accumulation_is_one_step_for_its_batches(node: Node, mailbox: Mailbox) -> None:
    quiet_trainer(strategy=node()).fit(SteppedSeldom(), numbers(32, batch_size=4))
    assert work_in_run(mailbox) == {(2, 32)}


class Two(Manual):
    """Two optimizers take turns within each batch, as in a GAN; each turn freezes the other's parameters."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[2])]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def test_several_optimizers_in_a_batch_make_one_step(node: Node, mailbox: Mailbox) -> None:
    trainer = quiet_trainer(strategy=node())
    model = Two()
    trainer.fit(model, numbers(32, batch_size=4))
    assert trainer.global_step == 16
    assert work_in_run(mailbox) == {(8, 32)}
    assert same_as_run(model, mailbox)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_as_ever(node: Node, mailbox: Mailbox, algorithm: str) -> None:
    """A step of at most 1e-6 × lr moves nothing that one can see."""
    model = Tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    quiet_trainer(strategy=node(), gradient_clip_val=1e-6, gradient_clip_algorithm=algorithm).fit(model, numbers())
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-5)
    assert work_in_run(mailbox) == {(8, 32)}


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_low_precision_trains_and_ends_with_the_run(node: Node, mailbox: Mailbox, precision: str) -> None:
    model = Tiny()
    quiet_trainer(strategy=node(), precision=precision, max_epochs=2).fit(model, numbers())
    assert work_in_run(mailbox) == {(16, 64)}
    fresh = Tiny().to(model.dtype)
    align(fresh, mailbox=mailbox)
    assert digest(fresh) == digest(model)


def test_a_compiled_model_trains_as_one_that_is_not(node: Node, mailbox: Mailbox) -> None:
    model = Tiny()
    compiled = torch.compile(model, backend="eager")
    quiet_trainer(strategy=node(), max_epochs=2).fit(compiled, numbers())
    assert work_in_run(mailbox) == {(16, 64)}
    assert same_as_run(model, mailbox)


def test_nodes_that_compile_parts_of_a_model_train_it_with_those_that_do_not(node: Node, mailbox: Mailbox) -> None:
    for number in range(2):
        model = Tiny()
        if number == 0:
            model.layers[0] = torch.compile(model.layers[0], backend="eager")
        quiet_trainer(strategy=node(f"node-{number}"), max_epochs=2).fit(model, numbers())
    assert work_in_run(mailbox) == {(32, 128)}
    assert same_as_run(model, mailbox)


def test_batch_norm_statistics_travel(node: Node, mailbox: Mailbox) -> None:
    model = Tiny(middle=nn.BatchNorm1d(3))
    quiet_trainer(strategy=node(), max_epochs=2).fit(model, numbers())
    fresh = Tiny(middle=nn.BatchNorm1d(3))
    align(fresh, mailbox=mailbox)
    torch.testing.assert_close(fresh.layers[1].running_mean, model.layers[1].running_mean)
    torch.testing.assert_close(fresh.layers[1].running_var, model.layers[1].running_var)
    assert float(fresh.layers[1].running_var[0]) != 1.0


def test_frozen_parameters_stay_at_home(node: Node, mailbox: Mailbox) -> None:
    model = Tiny()
    model.layers[0].requires_grad_(False)
    quiet_trainer(strategy=node()).fit(model, numbers())
    run = Run.open(mailbox)
    assert run is not None
    assert {spec.name for specs in run.layout for spec in specs} == {"layers.2.weight", "layers.2.bias"}


class Columns(Tiny):
    """Takes batches that are no tensors, a sample in each column."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((None, batch["inputs"].tensor.T))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...


class Opaque:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def columns() -> Any:
    return numbers(32, 4, collate_fn=lambda samples: {"inputs": Opaque(torch.stack([inputs for _, inputs in samples]).T)})


def test_the_number_of_samples_can_be_told_by_a_function(node: Node, mailbox: Mailbox) -> None:
    quiet_trainer(strategy=node(batch_size=lambda batch: batch["inputs"].tensor.shape[1])).fit(Columns(), columns())
    assert work_in_run(mailbox) == {(8, 32)}


def test_a_batch_without_a_number_of_samples_is_refused_with_the_cure(node: Node) -> None:
    with pytest.raises(ConfigError, match="pass batch_size="):
        quiet_trainer(strategy=node()).fit(Columns(), columns())


def test_a_model_without_trainable_parameters_is_refused(node: Node) -> None:
    model = Tiny()
    strategy = node()
    trainer = quiet_trainer(strategy=strategy, callbacks=[Freezes()])
    with pytest.raises(ConfigError, match="no trainable parameters"):
        trainer.fit(model, numbers())


class Freezes(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.requires_grad_(False)


class Thaws(Callback):
    """Makes the first layer trainable from the second epoch on."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.layers[0].requires_grad_(trainer.current_epoch > 0)


def test_parameters_that_become_trainable_later_are_warned_of(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny()
    model.layers[0].requires_grad_(False)
    quiet_trainer(strategy=node(), callbacks=[Thaws()], max_epochs=2).fit(model, numbers())
    assert "2 parameters (layers.0.bias, …) became trainable after this node had joined" in caplog.text
