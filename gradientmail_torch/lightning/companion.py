"""The life of a session around ``Trainer.fit``: join, exchange, leave, align."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradientmail_torch.errors import GradientMailError, LearnerFenced
from gradientmail_torch.lightning.barrier import NodeBarrier
from gradientmail_torch.lightning.counting import WorkCounter
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.parameters import access_for
from gradientmail_torch.lightning.participation import Participation
from gradientmail_torch.lightning.seeding import reseed, warn_if_unshuffled
from gradientmail_torch.lightning.signals import Preempted, TerminationFlag
from gradientmail_torch.session import Session, Settings, Stats, align
from gradientmail_torch.session.parameters import ParameterAccess

log = logging.getLogger(__name__)


class Companion(Callback):
    """Takes part in a run for the time of a ``fit``. Must be the first callback.

    It joins in ``on_train_start``, after checkpoints have been restored: the run's committed parameters win over
    a checkpoint's, and optimizers, schedulers and counters stay the checkpoint's. It exchanges at the end of
    each batch in which an optimizer stepped, before averaging callbacks read the parameters, and leaves in
    ``on_train_end``, before they write theirs. What never trains (sanity checks, the learning-rate finder,
    ``fast_dev_run``, a finished checkpoint) never joins.
    """

    def __init__(self, participation: Participation) -> None:
        self.participation = participation
        self.session: Session | None = None
        """The session of this process, on rank 0 of the node, while it trains."""
        self._group: Group | None = None
        self._access: ParameterAccess | None = None
        self._counter: WorkCounter | None = None
        self._termination = TerminationFlag()
        self._fits = 0
        self._last_stats: Stats | None = None
        self._joined = False

    @property
    def stats(self) -> Stats | None:
        """The session's figures, also after fit; None on other ranks than 0 and before joining."""
        return self.session.stats() if self.session is not None else self._last_stats

    # --- joining ---------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            log.info("fast_dev_run: not joining the run")
            return
        part = self.participation
        self._fits += 1
        self._group = group = Group(trainer.strategy)
        part.learner_id = group.lead(part.identify)
        self._access = access_for(pl_module, group, fragments=part.algorithm.fragments, buffers=part.algorithm.buffers)
        group.lead(lambda: self._join(pl_module))
        self._joined = True
        self._termination.install()
        self._counter = WorkCounter(trainer, part.batch_size)
        if part.reseed:
            reseed(part.identify(), group.rank)
            warn_if_unshuffled(trainer)
        if part.start_parties is not None:
            self._wait_at(self._named("start"), part.start_parties, part.start_timeout)
        group.lead(self._enter)

    def _join(self, pl_module: LightningModule) -> None:
        part = self.participation
        times = {each.name: getattr(part, each.name) for each in fields(Settings)}
        self.session = Session(
            pl_module, mailbox=part.open(), learner_id=part.identify(), algorithm=part.algorithm, access=self._access, **times
        )

    def _enter(self) -> None:
        assert self.session is not None
        self.session.__enter__()

    def _named(self, name: str) -> str:
        """A barrier's name serves once per run, so those of a second ``fit`` are numbered."""
        return name if self._fits == 1 else f"{name}-{self._fits}"

    def _wait_at(self, name: str, parties: int, timeout: float | None) -> list[str]:
        assert self._group is not None
        part = self.participation
        barrier = NodeBarrier(self._group, part.open, part.identify(), poll_interval=part.poll_interval)
        return barrier.wait(name, parties, timeout, interrupted=lambda: self._termination.raised)

    # --- training --------------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._joined or self._counter is None or self._group is None:
            return
        counter = self._counter
        counter.batch_ended(batch)
        if counter.steps >= self.participation.exchange_every:
            self._exchange(counter)
            if self._group.any(self._termination.raised):
                raise Preempted

    def _exchange(self, counter: WorkCounter) -> None:
        steps, samples = counter.take()

        def step() -> None:
            assert self.session is not None
            self.session.step(samples, steps=steps)

        assert self._group is not None
        if steps:
            self._group.lead(step)

    # --- leaving ---------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._joined or self._counter is None or self._group is None:
            return
        part = self.participation
        self._exchange(self._counter)
        self._group.lead(self._close)
        if part.done_parties is not None:
            try:
                self._wait_at(self._named("done"), part.done_parties, part.done_timeout)
            except TimeoutError as error:
                log.warning("going on without those who have not arrived: %s", error)
        if part.align:
            self._group.lead(lambda: align(pl_module, mailbox=part.open(), access=self._access))
        self._release()

    def _close(self) -> None:
        assert self.session is not None
        try:
            self.session.close(self.participation.close_timeout)
        finally:
            self._last_stats = self.session.stats()
            self.session = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._group is not None:
            self._group.detach()  # the node's other ranks may be anywhere: no collective from here on
        if self.session is not None:
            if not isinstance(exception, LearnerFenced):
                log.warning("%s is leaving the run after %s", self.participation.learner_id, type(exception).__name__)
            session, self.session = self.session, None
            session.leave(self.participation.leave_timeout, contribute=self._group is None or self._group.size == 1)
            self._last_stats = session.stats()
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        """Give back what the process was lent: hooks, the signal handler. Nothing here reaches the network."""
        if self._counter is not None:
            self._counter.close()
        self._counter = None
        self._termination.remove()
        self._joined = False
        self._access = None

    # --- checkpoints -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings only, so that a checkpoint loads without this package."""
        stats = self.stats
        if stats is None:
            return {}
        return {"learner_id": stats.learner_id, "steps": stats.steps, "samples": stats.samples, "versions": list(stats.versions)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is taken from a checkpoint: what the mailbox holds is newer or the same."""


def companion_of(trainer: Trainer) -> Companion | None:
    """The companion among a trainer's callbacks."""
    return next((callback for callback in trainer.callbacks if isinstance(callback, Companion)), None)  # type: ignore[attr-defined]


def required_companion(trainer: Trainer, who: str) -> Companion:
    found = companion_of(trainer)
    if found is None:
        raise GradientMailError(f"{who} needs mailbox=… and learner_id=…, or a GradientMailStrategy or GradientMailCallback in the Trainer")
    return found
