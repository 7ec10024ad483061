"""Nodes start from the same parameters and train on samples of their own."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from tiny import Numbers, Tiny, numbers, quiet_trainer
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from gradientmail_torch import GradientMailDDPStrategy, GradientMailStrategy
from gradientmail_torch.lightning.seeding import learner_seed, reseed

Node = Callable[..., GradientMailStrategy]


def trained(node: Node, learner_id: str, data: Any, **options: Any) -> Tiny:
    """A node as each machine starts it: with the same seed and the same program."""
    seed_everything(42, verbose=False)
    model = Tiny()
    quiet_trainer(strategy=node(learner_id, mailbox=f"memory://{os.urandom(4).hex()}", **options)).fit(model, data())
    return model


@pytest.mark.parametrize("workers", [0, 1])
def test_nodes_with_the_same_seed_draw_different_samples_from_the_same_start(node: Node, workers: int) -> None:
    """Worker processes draw the order before on_train_start, so that is too late for a seed."""
    options = {"num_workers": workers, **({"multiprocessing_context": "fork"} if workers else {})}
    a, b = (trained(node, name, lambda: numbers(**options)) for name in ("a", "b"))
    assert a.first == b.first
    assert a.seen != b.seen
    assert sorted(a.seen) == sorted(b.seen) == list(range(32))


def test_a_node_that_is_started_again_draws_as_before(node: Node) -> None:
    first, again = (trained(node, "a", numbers) for _ in range(2))
    assert first.seen == again.seen


def test_reseed_can_be_turned_off(node: Node) -> None:
    a, b = (trained(node, name, numbers, reseed=False) for name in ("a", "b"))
    assert a.seen == b.seen


def test_dropout_differs_from_node_to_node(node: Node) -> None:
    class Draws(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))

    drawn: list[tuple[float, float, float]] = []
    for name in ("a", "b"):
        seed_everything(42, verbose=False)
        trainer = quiet_trainer(strategy=node(name), callbacks=[Draws()], max_steps=1)
        trainer.fit(Tiny(), numbers(shuffle=False))
    assert all(a != b for a, b in zip(*drawn, strict=True))


def test_seeds_follow_the_users_and_leave_it_as_it_is() -> None:
    seed_everything(1, verbose=False)
    one = learner_seed("a")
    reseed("a", 0)
    assert os.environ["PL_GLOBAL_SEED"] == "1"
    seed_everything(2, verbose=False)
    assert len({one, learner_seed("a"), learner_seed("b"), learner_seed("a", rank=1)}) == 4


def test_without_a_seed_of_the_user_none_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    reseed("a", 0)
    assert "PL_GLOBAL_SEED" not in os.environ


def test_distributed_samplers_get_a_seed_of_the_learners_own() -> None:
    seeds = []
    for name in ("a", "b"):
        strategy = GradientMailDDPStrategy("memory://x", learner_id=name)
        quiet_trainer(strategy=strategy)
        seeds.append(strategy.distributed_sampler_kwargs["seed"])
    assert seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: numbers(shuffle=False), "is not shuffled"),
        (lambda: {"a": numbers(shuffle=False)}, "is not shuffled"),
        (lambda: numbers(shuffle=True, generator=torch.Generator()), "is shuffled by a generator of yours"),
        (lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), generator=torch.Generator())), "by a generator of yours"),
        (lambda: DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 1, 0, shuffle=False)), "is not shuffled"),
    ],
    ids=["sequential", "in a dictionary", "own generator", "own sampler", "distributed sampler"],
)
def test_data_that_is_the_same_on_every_node_is_warned_of(
    node: Node, data: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Either(Tiny):
        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch["a"] if isinstance(batch, dict) else batch)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

    quiet_trainer(strategy=node(), max_steps=1).fit(Either(), data())
    assert reason in caplog.text
    assert "every node may train on the same samples" in caplog.text


def test_shuffled_data_is_not_warned_of(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(strategy=node(), max_steps=1).fit(Tiny(), numbers())
    assert "same samples" not in caplog.text
