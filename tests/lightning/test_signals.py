"""SIGTERM and Ctrl-C: a node leaves within its deadline, publishes what it can, and ends with an exit code that says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from tiny import QUICK, Tiny, numbers, quiet_trainer

from gradientmail_torch import GradientMailStrategy, LocalSGD, Session, keys
from gradientmail_torch.callbacks import AlignOnValidation, EpochBarrier
from gradientmail_torch.lightning.signals import InterruptibleClock, Preempted
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Beat, read
from gradientmail_torch.session.run import Run
from gradientmail_torch.testing.faults import Refusals

Node = Callable[..., GradientMailStrategy]


def steps_in_run(mailbox: Mailbox) -> int:
    run = Run.open(mailbox)
    assert run is not None
    steps, version = 0, 1
    while (commit := run.commit(0, version)) is not None:
        steps += sum(merged.steps for merged in commit.merged)
        version += 1
    return steps


def has_left(mailbox: Mailbox, learner_id: str = "node") -> bool:
    beat = read(mailbox, Beat, keys.beat(learner_id, 1))
    return beat is not None and beat.state == "ended"


class Told(Callback):
    """Sends this process a signal at a hook."""

    def __init__(self, number: int, **at: int) -> None:
        self._number = number
        ((self._hook, self._batch),) = at.items()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._tell("training", batch_idx)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *more: int) -> None:
        self._tell("validation", batch_idx)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tell("end", 0)

    def _tell(self, hook: str, batch: int) -> None:
        if (hook, batch) == (self._hook, self._batch):
            signal.raise_signal(self._number)


@contextmanager
def ends_with(code: int) -> Iterator[None]:
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == code


@contextmanager
def signalled_while(number: int, waits: Callable[[], bool]) -> Iterator[None]:
    """Send this process a signal once ``waits`` is true."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if waits():
                os.kill(os.getpid(), number)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


# --- SIGTERM -------------------------------------------------------------------------------------------


def test_sigterm_ends_training_with_143_and_everything_is_in_the_run(node: Node, mailbox: Mailbox) -> None:
    strategy = node()
    with ends_with(143):
        quiet_trainer(strategy=strategy, max_epochs=100, callbacks=[Told(signal.SIGTERM, training=5)]).fit(Tiny(), numbers())
    assert steps_in_run(mailbox) == 6
    assert has_left(mailbox)


def test_sigterm_is_heard_between_two_exchanges(node: Node, mailbox: Mailbox) -> None:
    strategy = node(exchange_every=1000)
    with ends_with(143):
        quiet_trainer(strategy=strategy, max_epochs=100, callbacks=[Told(signal.SIGTERM, training=5)]).fit(Tiny(), numbers())
    assert strategy.stats is not None
    assert strategy.stats.steps == steps_in_run(mailbox) == 6


def test_sigterm_is_heard_in_a_validation_which_contributes_nothing_more(node: Node, mailbox: Mailbox) -> None:
    trainer = quiet_trainer(strategy=node(), callbacks=[Told(signal.SIGTERM, validation=1)], val_check_interval=3)
    with ends_with(143):
        trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    assert trainer.global_step == 3
    assert has_left(mailbox)


def test_sigterm_is_heard_while_waiting_for_the_others_to_start(node: Node, mailbox: Mailbox) -> None:
    def waiting() -> bool:
        return next(mailbox.list("barriers/start/"), None) is not None

    with ends_with(143), signalled_while(signal.SIGTERM, waiting):
        quiet_trainer(strategy=node(start_parties=2)).fit(Tiny(), numbers())
    assert has_left(mailbox)


def test_sigterm_is_heard_at_the_done_barrier(node: Node, mailbox: Mailbox) -> None:
    def waiting() -> bool:
        return next(mailbox.list("barriers/done/"), None) is not None

    with ends_with(143), signalled_while(signal.SIGTERM, waiting):
        quiet_trainer(strategy=node(done_parties=2)).fit(Tiny(), numbers())
    assert steps_in_run(mailbox) == 8


@pytest.mark.parametrize("callbacks", [[], [AlignOnValidation()]], ids=["at the end", "in a validation"])
def test_sigterm_is_heard_while_a_store_that_is_away_is_waited_for(callbacks: list[Callback], node: Node, mailbox: Mailbox) -> None:
    joined = threading.Event()

    class Joined(Callback):
        def on_train_start(self, *arguments: Any) -> None:
            joined.set()

    def away(operation: str, key: str) -> bool:
        if struck := joined.is_set() and key == keys.RUN:
            signal.raise_signal(signal.SIGTERM)
        return struck

    trainer = quiet_trainer(strategy=node(mailbox=Refusals(mailbox, away)), callbacks=[Joined(), *callbacks])
    with ends_with(143):
        trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    assert has_left(mailbox)


def test_sigterm_is_heard_while_closing_waits_for_a_quorum(node: Node, mailbox: Mailbox) -> None:
    """Then the node leaves what can still be published, within leave_timeout."""
    algorithm = LocalSGD(sync_every=100, parties=2)

    def closing() -> bool:
        beat = read(mailbox, Beat, keys.beat("node", 1))
        return beat is not None and beat.state == "leaving" and next(mailbox.list("rounds/"), None) is not None

    with (
        Session(Tiny(), mailbox=mailbox, learner_id="idle", algorithm=algorithm, **QUICK),
        ends_with(143),
        signalled_while(signal.SIGTERM, closing),
    ):
        quiet_trainer(strategy=node(algorithm=algorithm, leave_timeout=0.2)).fit(Tiny(), numbers())
    assert has_left(mailbox)


def test_sigterm_is_heard_while_a_synchronous_algorithm_waits(node: Node, mailbox: Mailbox) -> None:
    def waiting() -> bool:
        return next(mailbox.list("rounds/"), None) is not None

    with ends_with(143), signalled_while(signal.SIGTERM, waiting):
        strategy = node(algorithm=LocalSGD(sync_every=2, parties=2), leave_timeout=0.2)
        quiet_trainer(strategy=strategy).fit(Tiny(), numbers())
    assert has_left(mailbox)


def test_sigterm_after_the_last_step_is_not_swallowed(node: Node, mailbox: Mailbox) -> None:
    """It arrives when there is nothing left to wait for."""
    with ends_with(143):
        quiet_trainer(strategy=node(), callbacks=[Told(signal.SIGTERM, training=7)]).fit(Tiny(), numbers())
    assert steps_in_run(mailbox) == 8


def test_sigterm_at_a_barrier_callback_is_heard(node: Node, mailbox: Mailbox) -> None:
    def waiting() -> bool:
        return next(mailbox.list("barriers/epoch-0/"), None) is not None

    barrier = EpochBarrier(parties=2, poll_interval=0.05)
    with ends_with(143), signalled_while(signal.SIGTERM, waiting):
        quiet_trainer(strategy=node(), callbacks=[barrier]).fit(Tiny(), numbers())
    assert has_left(mailbox)


def test_a_sigterm_handler_of_the_programs_own_is_given_back(node: Node) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        quiet_trainer(strategy=node()).fit(Tiny(), numbers())
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fit_in_another_thread_leaves_signals_alone(node: Node, mailbox: Mailbox) -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers: list[Any] = []

    class Looks(Callback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            handlers.append(signal.getsignal(signal.SIGTERM))

    fit = threading.Thread(target=lambda: quiet_trainer(strategy=node(), callbacks=[Looks()]).fit(Tiny(), numbers()))
    fit.start()
    fit.join()
    assert set(handlers) == {before}
    assert steps_in_run(mailbox) == 8


# --- Ctrl-C --------------------------------------------------------------------------------------------


def test_ctrl_c_leaves_and_everything_is_in_the_run(node: Node, mailbox: Mailbox) -> None:
    with ends_with(1):
        quiet_trainer(strategy=node(), max_epochs=100, callbacks=[Told(signal.SIGINT, training=5)]).fit(Tiny(), numbers())
    assert steps_in_run(mailbox) == 5
    assert has_left(mailbox)


def test_ctrl_c_in_a_barrier_leaves(node: Node, mailbox: Mailbox) -> None:
    def waiting() -> bool:
        return next(mailbox.list("barriers/start/"), None) is not None

    with ends_with(1), signalled_while(signal.SIGINT, waiting):
        quiet_trainer(strategy=node(start_parties=2)).fit(Tiny(), numbers())
    assert has_left(mailbox)


def test_ctrl_c_while_closing_waits_leaves(node: Node, mailbox: Mailbox) -> None:
    algorithm = LocalSGD(sync_every=100, parties=2)

    def closing() -> bool:
        return next(mailbox.list("rounds/"), None) is not None

    with (
        Session(Tiny(), mailbox=mailbox, learner_id="idle", algorithm=algorithm, **QUICK),
        ends_with(1),
        signalled_while(signal.SIGINT, closing),
    ):
        quiet_trainer(strategy=node(algorithm=algorithm, leave_timeout=0.2)).fit(Tiny(), numbers())
    assert has_left(mailbox)


# --- the deadline --------------------------------------------------------------------------------------


class GoesAway:
    """A mailbox whose machine is lost once it is told to be: nothing answers any more."""

    def __init__(self, inner: Mailbox) -> None:
        self._inner = inner
        self.away = threading.Event()
        self.back = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if self.away.is_set():
            self.back.wait()
        return getattr(self._inner, name)


def test_leaving_ends_also_when_the_mailbox_never_answers_again(node: Node, mailbox: Mailbox) -> None:
    """Everything that waits for the store is left behind after the deadline."""
    lost = GoesAway(mailbox)

    class Loses(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
            if batch_idx == 5:
                lost.away.set()
                raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            quiet_trainer(strategy=node(mailbox=lost, leave_timeout=0.3), callbacks=[Loses()]).fit(Tiny(), numbers())
        assert not lost.back.is_set()
    finally:
        lost.back.set()


def test_the_clock_interrupts_once_and_on_its_own_thread_alone() -> None:
    clock = InterruptibleClock(lambda: True)
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            clock.sleep(0)
            clock.wait(threading.Event(), 0)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert not failed
    with pytest.raises(Preempted):
        clock.wait(threading.Event(), 60)
    clock.sleep(0)
    clock.wait(threading.Event(), 0)
