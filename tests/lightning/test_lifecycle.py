"""When a node joins a run, when it does not, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from tiny import QUICK, Numbers, Tiny, digest, numbers, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy, LocalSGD, Session, align, keys
from gradientmail_torch.errors import BackgroundFailure, GradientMailError, RunTimeout
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Beat, read
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.session.run import Run

Node = Callable[..., GradientMailStrategy]


def is_empty(mailbox: Mailbox) -> bool:
    return next(mailbox.list(""), None) is None


def state_of(mailbox: Mailbox, learner_id: str, generation: int = 1) -> str:
    beat = read(mailbox, Beat, keys.beat(learner_id, generation))
    assert beat is not None
    return beat.state


class At(Callback):
    """Does something at one batch."""

    def __init__(self, batch: int, action: Callable[[Trainer, LightningModule], object]) -> None:
        self._batch = batch
        self._action = action

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._batch:
            self._action(trainer, pl_module)


# --- what never joins ----------------------------------------------------------------------------------


def test_constructing_a_strategy_and_a_trainer_touches_nothing(node: Node, mailbox: Mailbox) -> None:
    quiet_trainer(strategy=node())
    quiet_trainer(strategy=node())
    assert is_empty(mailbox)


def test_fast_dev_run_joins_nothing(node: Node, mailbox: Mailbox) -> None:
    trainer = quiet_trainer(strategy=node(mailbox="s3://no-such-bucket-here/x", start_parties=9), fast_dev_run=True)
    trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    assert trainer.global_step == 1


def test_validating_alone_joins_nothing(node: Node, mailbox: Mailbox) -> None:
    quiet_trainer(strategy=node()).validate(Tiny(), numbers(shuffle=False), verbose=False)
    assert is_empty(mailbox)


def test_a_fit_without_anything_to_do_joins_nothing(node: Node, mailbox: Mailbox) -> None:
    quiet_trainer(strategy=node(), max_epochs=0).fit(Tiny(), numbers())
    quiet_trainer(strategy=node(), limit_train_batches=0).fit(Tiny(), numbers())
    assert is_empty(mailbox)


def test_a_finished_checkpoint_joins_nothing(node: Node, mailbox: Mailbox, tmp_path: Path) -> None:
    first = quiet_trainer()
    first.fit(Tiny(), numbers())
    first.save_checkpoint(tmp_path / "done.ckpt")
    quiet_trainer(strategy=node()).fit(Tiny(), numbers(), ckpt_path=tmp_path / "done.ckpt")
    assert is_empty(mailbox)


def test_the_tuner_never_joins(node: Node, mailbox: Mailbox, tmp_path: Path) -> None:
    trainer = quiet_trainer(strategy=node(), default_root_dir=tmp_path)
    found = Tuner(trainer).lr_find(Tiny(), numbers(64), num_training=10)
    assert found is not None
    assert len(found.results["lr"]) == 10
    assert is_empty(mailbox)


def test_the_learning_rate_finder_before_training_publishes_nothing(node: Node, mailbox: Mailbox, tmp_path: Path) -> None:
    strategy = node()
    model = Tiny()
    finder = LearningRateFinder(num_training_steps=10)
    quiet_trainer(strategy=strategy, callbacks=[finder], default_root_dir=tmp_path).fit(model, numbers(32))
    assert strategy.stats is not None
    assert (strategy.stats.steps, strategy.stats.samples) == (8, 32)
    assert sum(merged.steps for merged in merged_in(mailbox)) == 8


def merged_in(mailbox: Mailbox) -> Iterator[Any]:
    """What is merged into the first fragment, commit by commit."""
    run = Run.open(mailbox)
    assert run is not None
    version = 1
    while (commit := run.commit(0, version)) is not None:
        yield from commit.merged
        version += 1


# --- joining -------------------------------------------------------------------------------------------


def test_the_founder_gives_the_initial_parameters_and_all_others_take_the_runs(node: Node, mailbox: Mailbox) -> None:
    founder, late = Tiny(), Tiny()
    initial = digest(founder)
    quiet_trainer(strategy=node("a")).fit(founder, numbers())
    quiet_trainer(strategy=node("b")).fit(late, numbers())
    assert founder.first == initial
    assert late.first == digest(founder)


def test_the_sanity_check_is_done_before_joining(node: Node, mailbox: Mailbox) -> None:
    seen: list[bool] = []

    class Looks(Callback):
        def on_validation_batch_start(self, trainer: Trainer, *arguments: Any) -> None:
            seen.append(trainer.sanity_checking and is_empty(mailbox))

    trainer = quiet_trainer(strategy=node(), num_sanity_val_steps=1, callbacks=[Looks()], check_val_every_n_epoch=2)
    trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    assert seen == [True]


def test_start_barrier_waits_for_the_parties_and_says_who_is_missing(node: Node, mailbox: Mailbox) -> None:
    with pytest.raises(RunTimeout, match=r"barrier 'start' .*: 1 of 2 learners arrived within 0.2 s \(node\)"):
        quiet_trainer(strategy=node(start_parties=2, start_timeout=0.2)).fit(Tiny(), numbers())
    assert state_of(mailbox, "node") == "ended"


def test_start_barrier_opens_when_all_have_joined(node: Node, mailbox: Mailbox) -> None:
    Barrier(mailbox, "other", poll_interval=0.05).wait("start", parties=1)
    strategy = node(start_parties=2)
    quiet_trainer(strategy=strategy).fit(Tiny(), numbers())
    assert strategy.stats is not None


def test_an_iterable_dataset_trains_as_any_other(node: Node, mailbox: Mailbox) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from (Numbers(32)[index] for index in range(32))

    strategy = node()
    quiet_trainer(strategy=strategy).fit(Tiny(), DataLoader(Stream(), 4))
    assert strategy.stats is not None
    assert (strategy.stats.steps, strategy.stats.samples) == (8, 32)


# --- training on and ending ----------------------------------------------------------------------------


def test_validating_and_testing_right_after_fit_scores_the_runs_parameters(node: Node, mailbox: Mailbox) -> None:
    model, fresh = Tiny(), Tiny()
    trainer = quiet_trainer(strategy=node(), max_epochs=2)
    trainer.fit(model, numbers(), numbers(shuffle=False))
    data = numbers(shuffle=False)
    (validated,) = trainer.validate(model, data, verbose=False)
    (tested,) = trainer.test(model, data, verbose=False)
    align(fresh, mailbox=mailbox)
    (expected,) = quiet_trainer().validate(fresh, data, verbose=False)
    assert validated["val_loss"] == tested["test_loss"] == expected["val_loss"]


def test_validation_in_the_middle_scores_the_nodes_own_parameters(node: Node, mailbox: Mailbox) -> None:
    scored: list[tuple[str, str]] = []

    class Compares(Callback):
        def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self._before = digest(pl_module)

        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            scored.append((self._before, digest(pl_module)))

    strategy = node()
    trainer = quiet_trainer(strategy=strategy, callbacks=[Compares()], val_check_interval=2)
    trainer.fit(Tiny(), numbers(32), numbers(shuffle=False))
    assert len(scored) == 4
    assert all(before == after for before, after in scored)


def test_a_second_fit_on_the_same_strategy_joins_again(node: Node, mailbox: Mailbox) -> None:
    strategy = node(start_parties=1, done_parties=1)
    trainer = quiet_trainer(strategy=strategy)
    model = Tiny()
    trainer.fit(model, numbers())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model, numbers())
    assert sum(merged.steps for merged in merged_in(mailbox)) == 24
    assert state_of(mailbox, "node", generation=2) == "ended"
    assert {key.split("/")[1] for key in mailbox.list("barriers/")} == {"start", "start-2", "done", "done-2"}
    assert sum(type(callback).__name__ == "Companion" for callback in trainer.callbacks) == 1


def test_a_fit_that_is_tried_again_meets_the_others_at_the_same_barriers(node: Node, mailbox: Mailbox) -> None:
    def fail(trainer: Trainer, module: LightningModule) -> None:
        trainer.callbacks.remove(failing)
        raise ValueError("once")

    failing = At(3, fail)
    trainer = quiet_trainer(strategy=node(start_parties=1, done_parties=1), callbacks=[failing])
    with pytest.raises(ValueError, match="once"):
        trainer.fit(Tiny(), numbers())
    trainer.fit(Tiny(), numbers())
    assert {key.split("/")[1] for key in mailbox.list("barriers/")} == {"start", "done"}


def test_early_stopping_ends_the_nodes_part(node: Node, mailbox: Mailbox) -> None:
    strategy = node()
    stopping = EarlyStopping("val_loss", patience=0, min_delta=100.0)
    trainer = quiet_trainer(strategy=strategy, max_epochs=50, callbacks=[stopping])
    model = Tiny()
    trainer.fit(model, numbers(), numbers(shuffle=False))
    assert trainer.current_epoch == 2
    assert state_of(mailbox, "node") == "ended"
    assert sum(merged.steps for merged in merged_in(mailbox)) == 16


def test_done_barrier_goes_on_with_those_who_have_arrived(node: Node, mailbox: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(strategy=node(done_parties=2, done_timeout=0.2)).fit(Tiny(), numbers())
    assert "going on without those who have not arrived" in caplog.text


def test_the_session_is_left_also_when_its_close_runs_out_of_time(node: Node, mailbox: Mailbox) -> None:
    """A round that needs two learners never closes with one alone training."""
    algorithm = DecoupledDiLoCo(quorum_size=2)
    with Session(Tiny(), mailbox=mailbox, learner_id="idle", algorithm=algorithm, **QUICK):
        with pytest.raises(RunTimeout, match=r"node left after 0.3 s without 8 steps of fragment 0"):
            quiet_trainer(strategy=node(algorithm=algorithm, close_timeout=0.3)).fit(Tiny(), numbers())
        assert state_of(mailbox, "node") == "ended"


# --- exceptions ----------------------------------------------------------------------------------------


def test_an_exception_leaves_and_publishes_what_has_been_done(node: Node, mailbox: Mailbox) -> None:
    def fail(trainer: Trainer, module: LightningModule) -> None:
        raise ZeroDivisionError

    strategy = node()
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(strategy=strategy, callbacks=[At(5, fail)]).fit(Tiny(), numbers())
    assert sum(merged.steps for merged in merged_in(mailbox)) == 5
    assert state_of(mailbox, "node") == "ended"
    assert strategy.stats is not None
    assert strategy.stats.steps == 5


def test_an_exception_in_validation_publishes_no_parameters_that_may_be_anothers(node: Node, mailbox: Mailbox) -> None:
    """Averaging callbacks put theirs into the model for a validation."""

    class Swaps(Callback):
        def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
            with torch.no_grad():
                pl_module.layers[0].weight.fill_(1e6)
            raise ZeroDivisionError

    trainer = quiet_trainer(strategy=node(), callbacks=[Swaps()], val_check_interval=3)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    fresh = Tiny()
    align(fresh, mailbox=mailbox)
    assert fresh.layers[0].weight.abs().max() < 1e3
    assert state_of(mailbox, "node") == "ended"


def test_an_exception_before_joining_is_passed_on_as_it_is(node: Node, mailbox: Mailbox) -> None:
    class Fails(Callback):
        def on_fit_start(self, *arguments: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet_trainer(strategy=node(), callbacks=[Fails()]).fit(Tiny(), numbers())
    assert is_empty(mailbox)


def test_what_fails_in_the_background_is_raised_on_the_training_thread(node: Node, mailbox: Mailbox) -> None:
    class Broken(type(mailbox)):  # type: ignore[misc]
        def put(self, key: str, body: Any) -> None:
            if key.startswith("data/"):
                raise GradientMailError("the disk is on fire")
            super().put(key, body)

    with pytest.raises(BackgroundFailure, match="the disk is on fire"):
        quiet_trainer(strategy=node(mailbox=Broken()), max_epochs=1000).fit(Tiny(), numbers())


def test_a_synchronous_algorithm_waits_on_the_training_thread(node: Node, mailbox: Mailbox) -> None:
    model = Tiny()
    strategy = node(algorithm=LocalSGD(sync_every=2, parties=1))
    quiet_trainer(strategy=strategy).fit(model, numbers(32))
    assert strategy.stats is not None
    assert strategy.stats.versions == (4,)


# --- checkpoints ---------------------------------------------------------------------------------------


class Momentum(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_resuming_takes_the_runs_parameters_and_the_checkpoints_optimizer(node: Node, mailbox: Mailbox, tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, filename="kept", save_last=False)
    model = Momentum()
    quiet_trainer(strategy=node(), enable_checkpointing=True, callbacks=[checkpoints]).fit(model, numbers())
    quiet_trainer(strategy=node("other")).fit(Momentum(), numbers())  # the run goes on meanwhile
    newest = Momentum()
    align(newest, mailbox=mailbox)

    again = Momentum()
    momenta: list[torch.Tensor] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            momenta.extend(state["momentum_buffer"].clone() for state in trainer.optimizers[0].state.values())

    trainer = quiet_trainer(strategy=node(), max_epochs=2, callbacks=[Looks()])
    trainer.fit(again, numbers(), ckpt_path=tmp_path / "kept.ckpt")
    assert again.first == digest(newest)
    saved = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    expected = [state["momentum_buffer"] for state in saved["optimizer_states"][0]["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(momenta, expected, strict=True))
    assert trainer.current_epoch == 2
    assert trainer.global_step == 16


def test_a_run_that_is_founded_from_a_checkpoint_begins_with_its_parameters(node: Node, mailbox: Mailbox, tmp_path: Path) -> None:
    plain = quiet_trainer()
    trained = Tiny()
    plain.fit(trained, numbers())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    model = Tiny()
    quiet_trainer(strategy=node(), max_epochs=2).fit(model, numbers(), ckpt_path=tmp_path / "plain.ckpt")
    assert model.first == digest(trained)


def test_a_checkpoint_loads_without_this_package_and_with_weights_only(
    node: Node, mailbox: Mailbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet_trainer(strategy=node(), enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, filename="kept")])
    model = Tiny()
    trainer.fit(model, numbers())
    saved = torch.load(tmp_path / "kept.ckpt", weights_only=True)
    state = saved["callbacks"]["Companion"]
    assert state["learner_id"] == "node"
    assert state["steps"] == 8
    elsewhere = Tiny()
    plain = quiet_trainer(max_epochs=2)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint need to be provided"):
        plain.fit(elsewhere, numbers(), ckpt_path=tmp_path / "kept.ckpt")
    assert plain.global_step == 16
    assert digest(Tiny.load_from_checkpoint(tmp_path / "kept.ckpt", weights_only=True)) != digest(Tiny())


def test_a_checkpoint_after_an_exchange_holds_what_training_goes_on_with(node: Node, mailbox: Mailbox, tmp_path: Path) -> None:
    live: list[str] = []

    class Live(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
            live.append(digest(pl_module))

    checkpoints = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    quiet_trainer(strategy=node(), enable_checkpointing=True, callbacks=[Live(), checkpoints]).fit(Tiny(), numbers(32))
    for step in (3, 6):
        kept = Tiny.load_from_checkpoint(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert digest(kept) == live[step - 1]
