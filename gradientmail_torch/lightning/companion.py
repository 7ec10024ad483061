"""The life of a session around ``Trainer.fit``: join, exchange, leave, align."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from gradientmail_torch.algorithms.layout import split
from gradientmail_torch.algorithms.model_tensors import describe, plain_name, travelling
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import LearnerFenced
from gradientmail_torch.lightning.alignment import align_together
from gradientmail_torch.lightning.barrier import wait_together
from gradientmail_torch.lightning.counting import WorkCounter
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.joinbar import JoinBar, join_bar
from gradientmail_torch.lightning.parameters import GroupParameters, access_for, reshard
from gradientmail_torch.lightning.participation import Participation
from gradientmail_torch.lightning.seeding import reseed, warn_if_same_data
from gradientmail_torch.lightning.signals import InterruptibleClock, Preempted, Termination
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox
from gradientmail_torch.session import Session, Settings, Stats

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
        self.termination = Termination()
        self._group: Group | None = None
        self._access: GroupParameters | None = None
        self._counter: WorkCounter | None = None
        """While this node takes part."""
        self._tensors: set[str] = set()
        self._last_stats: Stats | None = None
        self._finished_fits = 0

    @property
    def stats(self) -> Stats | None:
        """The session's figures, also after fit; None on other ranks than 0 and before joining."""
        session = self.session  # Prometheus asks from a thread of its own while it closes
        return session.stats() if session is not None else self._last_stats

    @property
    def steps(self) -> int:
        """Optimizer steps of this fit, while this node takes part; cheap enough to be asked for after each."""
        return self._counter.total_steps if self._counter is not None else 0

    # --- joining ---------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The parameters are the user's by now, and nothing has been drawn from the training data."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            log.info("fast_dev_run: not joining the run")
            return
        part = self.participation
        group = Group(trainer.strategy)
        part.learner_id = group.lead(part.identify)
        if part.reseed:
            reseed(part.learner_id, group.rank)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        part = self.participation
        self._group = group = Group(trainer.strategy)
        self.termination.install()
        reshard(pl_module)
        layout = split(describe(pl_module, buffers=part.algorithm.buffers), part.algorithm.fragments)
        self._access = access_for(pl_module, group, layout)
        inquire = group.inquiry(lambda: self.termination.due)
        group.lead(lambda: self._join(pl_module, InterruptibleClock(inquire), join_bar(trainer)))
        self._counter = WorkCounter(trainer, part.batch_size)
        self._tensors = set(travelling(pl_module, buffers=part.algorithm.buffers))
        warn_if_same_data(trainer)
        if part.start_parties is not None:
            self._wait_at("start", part.start_parties, part.start_timeout)
        group.lead(self._begin)

    def _join(self, pl_module: LightningModule, clock: Clock, bar: JoinBar | None) -> None:
        part = self.participation
        with bar or nullcontext() as on_join:
            self.session = Session(
                pl_module,
                mailbox=part.open(),
                learner_id=part.identify(),
                algorithm=part.algorithm,
                access=self._access,
                on_join=on_join,
                clock=clock,
                **{each.name: getattr(part, each.name) for each in fields(Settings)},
            )

    def _begin(self) -> None:
        assert self.session is not None
        self.session.__enter__()

    def _wait_at(self, name: str, parties: int, timeout: float | None) -> list[str]:
        """A barrier's name serves once per run, so those of a second ``fit`` are numbered."""
        assert self._group is not None
        part = self.participation
        return wait_together(
            self._group,
            f"{name}-{self._finished_fits + 1}" if self._finished_fits else name,
            parties,
            timeout,
            mailbox=part.open,
            learner_id=part.identify(),
            poll_interval=part.settings.longest_look,
            interrupted=lambda: self.termination.due,
        )

    # --- training --------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._counter is None:
            return
        if _average_comes_next(trainer):
            self._finish(pl_module)
        else:
            self._warn_of_new_parameters(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._counter is None or self._group is None:
            return
        self._counter.batch_ended(batch)
        if self._counter.steps >= self.participation.exchange_every or (self._group.alone and self.termination.due):
            self._exchange()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._counter is not None and self._group is not None and self._group.alone and self.termination.due:
            self._exchange()

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._group is not None and self._group.alone and self.termination.due:
            raise Preempted  # other callbacks may have put other parameters into the model: nothing is contributed

    def _exchange(self) -> None:
        """Give the session its chance. Only where it has something to do do the node's ranks come together."""
        assert self._group is not None
        stop, wanted = self._group.any(self.termination.due, self._tell())
        if wanted:
            self._group.lead(lambda: self.session.exchange() if self.session is not None else None)
        self._leave_if(stop)

    def _tell(self) -> bool:
        """Tell the session of the steps made since the last time. True when it has something to do."""
        steps, samples = self._counter.take() if self._counter is not None else (0, 0)
        return self.session.count(samples, steps=steps) if self.session is not None and steps else False

    def _leave_if(self, stop: bool) -> None:
        """Leave at a step boundary, where all ranks of the node are in step."""
        if stop and self._group is not None:
            self.termination.heed()
            self._group.lead(self._leave)
            raise Preempted

    def _warn_of_new_parameters(self, pl_module: LightningModule) -> None:
        new = {plain_name(name) for name, parameter in pl_module.named_parameters() if parameter.requires_grad} - self._tensors
        if new:
            self._tensors |= new
            log.warning(
                "%d parameters (%s, …) became trainable after this node had joined: they are trained on this node alone. "
                "Have all of them trainable from the start, with a learning rate of 0 for those that come later",
                len(new), min(new),
            )  # fmt: skip

    # --- leaving ---------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._counter is not None:
            self._warn_of_new_parameters(pl_module)
            self._finish(pl_module)

    def _finish(self, pl_module: LightningModule) -> None:
        """Leave the run as one who has done all it wanted to."""
        assert self._group is not None
        part, group = self.participation, self._group
        self._exchange()
        group.lead(self._close)
        if part.done_parties is not None:
            try:
                self._wait_at("done", part.done_parties, part.done_timeout)
            except TimeoutError as error:
                log.warning("going on without those who have not arrived: %s", error)
        if part.align:
            place = Place(part.open, part.identify, outage_timeout=part.outage_timeout, interrupted=lambda: self.termination.due)
            align_together(pl_module, group, place.patiently(group))
        self._leave_if(group.any(self.termination.due)[0])
        self._finished_fits += 1
        self._release()

    def _close(self) -> None:
        assert self.session is not None
        try:
            self.session.close(self.participation.close_timeout, leave_timeout=self.participation.leave_timeout)
        finally:
            self._last_stats = self.session.stats()
            self.session = None

    def _leave(self, *, contribute: bool = True) -> None:
        if self.session is None:
            return
        self._tell()
        session, self.session = self.session, None
        session.leave(self.participation.leave_timeout, contribute=contribute)
        self._last_stats = session.stats()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.termination.heed()
        if self._group is not None:
            self._group.detach()  # the node's other ranks may be anywhere: no collective from here on
        if self.session is not None:
            if not isinstance(exception, LearnerFenced):
                log.warning("%s is leaving the run after %s", self.participation.learner_id, type(exception).__name__)
            # In a validation other callbacks may have put other parameters into the model; a shard is no fragment.
            readable = trainer.training and (self._access is None or not self._access.sharded)
            self._leave(contribute=readable)
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(contribute=False)
        self._release()

    def _release(self) -> None:
        """Give back what the process was lent: hooks and the signal handler."""
        if self._counter is not None:
            self._counter.close()
        self._counter = None
        self.termination.remove()
        self._access = None
        self._group = None

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


@dataclass(frozen=True, slots=True)
class Place:
    """Where a callback meets the other nodes, and as whom."""

    open: Callable[[], Mailbox]
    identify: Callable[[], str]
    outage_timeout: float
    """Seconds that the mailbox may be away."""
    interrupted: Callable[[], bool]
    """Whether this process was told to stop."""

    def patiently(self, group: Group) -> Callable[[], Mailbox]:
        """:attr:`open` for rank 0, which waits for a mailbox that is away until the node is told to stop. Called on every rank."""
        inquire = group.inquiry(self.interrupted)
        return lambda: RetryingMailbox(self.open(), patience_s=self.outage_timeout, clock=InterruptibleClock(inquire))


def place_of(trainer: Trainer, own: Participation) -> Place:
    """A callback's own mailbox and learner ID; what it leaves open is that of the strategy or callback that takes part.

    Without one of those it is the environment's.
    """
    companion = companion_of(trainer)
    theirs = companion.participation if companion is not None else getattr(trainer.strategy, "participation", own)
    return Place(
        open=(own if own.mailbox is not None else theirs).open,
        identify=(own if own.learner_id is not None else theirs).identify,
        outage_timeout=theirs.outage_timeout,
        interrupted=lambda: trainer.received_sigterm or (companion is not None and companion.termination.due),
    )


def _average_comes_next(trainer: Trainer) -> bool:
    """Whether SWA now puts its average into the model, for an epoch that only refreshes BatchNorm's statistics."""
    return any(
        isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch == callback.swa_end + 1
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )
