"""What a training loop holds: one learner's part in a run."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from uuid import uuid4

from torch import Tensor, nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms.algorithm import Algorithm, DecoupledDiLoCo, Pace
from gradientmail_torch.algorithms.layout import split
from gradientmail_torch.algorithms.model_tensors import describe, digest_of_frozen
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, GradientMailError, RunTimeout
from gradientmail_torch.mailbox import CountingMailbox, Mailbox, Usage, open_mailbox
from gradientmail_torch.session.engine import Engine
from gradientmail_torch.session.freed_memory import give_back_freed
from gradientmail_torch.session.joining import JoinProgress, OnJoin, logged
from gradientmail_torch.session.leaving import Leaving
from gradientmail_torch.session.membership import Membership, Progress
from gradientmail_torch.session.parameters import LocalParameters, ParameterAccess, initial_values
from gradientmail_torch.session.replica import Replica, Tally, joined
from gradientmail_torch.session.run import Founding, Run
from gradientmail_torch.session.settings import Settings

log = logging.getLogger(__name__)

STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A session's figures so far."""

    learner_id: str
    steps: int
    samples: int
    versions: tuple[int, ...]
    """Adopted version of each fragment."""
    learners: int
    """Live learners in training, this one included."""
    tally: Tally
    staleness_steps: int
    """Own steps on the oldest base that has something newer on its way."""
    stall_seconds: float
    """Time that the training thread has lost to the session."""
    seconds_per_step: float
    usage: Usage


class Session:
    """Joins the run in ``mailbox``, founding it when there is none, and trains ``model`` with all who are in it.

    Constructing a session takes the learner ID, loads the newest committed parameters into ``model`` and starts
    the background threads. :meth:`step` is called after each optimizer step, always on the same thread, and
    never waits for the network (but for the synchronous algorithms, whose point it is to wait). Leaving the
    ``with`` block, or :meth:`close`, waits until everything this learner has done is in a commit.

    Args:
        model: any module with trainable parameters. Which tensors travel is settled here.
        mailbox: a :class:`~gradientmail_torch.mailbox.Mailbox` or a URL.
        learner_id: this node's name in the run, one process each.
        algorithm: :class:`DecoupledDiLoCo` unless given.
        lease, poll_interval, outage_timeout, step_timeout, keep, keep_seconds: see :class:`Settings`.
        access: how the model's tensors are reached, where they are not all in this process.
        on_join: told how far joining has come, after each fragment; without one a large model's progress goes to the log.

    Raises:
        LearnerIdInUse: another process that is alive has this ID.
        RunMismatch: the run has another model or algorithm.
        MailboxError: the mailbox cannot be used; the text says why.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        mailbox: Mailbox | str | os.PathLike[str],
        learner_id: str,
        algorithm: Algorithm | None = None,
        lease: float = 30.0,
        poll_interval: float | None = None,
        outage_timeout: float = 600.0,
        step_timeout: float = 600.0,
        keep: int | None = 4,
        keep_seconds: float = 60.0,
        access: ParameterAccess | None = None,
        on_join: OnJoin | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.algorithm = algorithm or DecoupledDiLoCo()
        self.learner_id = keys.check_learner_id(learner_id)
        self._settings = Settings(
            lease=lease,
            poll_interval=poll_interval,
            outage_timeout=outage_timeout,
            step_timeout=step_timeout,
            keep=keep,
            keep_seconds=keep_seconds,
        )
        layout = split(describe(model, buffers=self.algorithm.buffers), self.algorithm.fragments)
        access = access or LocalParameters(model, layout)
        if any(parameter.is_cuda for parameter in model.parameters()):
            give_back_freed()
        self._clock = clock
        self._mailbox = CountingMailbox(open_mailbox(mailbox, clock=clock))
        self._attention = False
        self._changed = threading.Event()
        self._stall_seconds = 0.0
        self._seconds_per_step = 0.0
        self._boundary_at, self._boundary_step = clock.monotonic(), 0
        self._closed = False
        self._stale = False
        self._replica: Replica | None = None

        joining = JoinProgress(layout, on_join or logged(self.learner_id, clock))

        def initial(fragment: int) -> Sequence[Tensor]:
            joining.founding(fragment)
            return initial_values(access, fragment)

        self._membership = Membership(self._mailbox, self.learner_id, settings=self._settings, clock=clock, progress=self._progress)
        self._engine = Engine(self._membership, settings=self._settings, clock=clock, attend=self._attend)
        try:
            founding = Founding(layout, self.algorithm, self.learner_id, clock.wall(), initial, digest_of_frozen(model, layout))
            self.run = Run.join(self._mailbox, founding)
            replica = self._load(access, joining)
            self._engine.start(self.run, replica, self.algorithm, pace=self._pace)
            self._replica = replica  # from here on the heartbeat speaks of it
        except BaseException:
            self._membership.state = "ended"
            self._engine.stop(STOP_SECONDS)
            raise
        self._next_due = 1
        log.info("%s joined %r at versions %s", self.learner_id, self._mailbox, self.versions)

    def _load(self, access: ParameterAccess, joining: JoinProgress) -> Replica:
        """Load the newest committed value of every fragment into the model."""
        self._membership.observe()
        fragments = []
        for index in joining.loading(range(len(self.run.layout))):
            commit, values = self.run.newest(index, from_version=self._membership.version_hint(index))
            due = self.algorithm.first_step_due(index, len(self.run.layout))
            fragments.append(joined(index, self.run.layout[index], commit, values, due))
        replica = Replica(access, self.algorithm, fragments)
        replica.load()
        return replica

    # --- training --------------------------------------------------------------------------------------

    def step(self, samples: int, *, steps: int = 1) -> None:
        """Say that an optimizer step on ``samples`` samples has been made. Adopts and contributes what is due.

        ``steps`` is above 1 where a loop calls this less often than it steps.

        Raises what has gone wrong in the background: :class:`LearnerFenced`, or :class:`BackgroundFailure`.
        """
        if self.count(samples, steps=steps):
            self.exchange()

    def count(self, samples: int, *, steps: int = 1) -> bool:
        """The first half of :meth:`step`: take the step down. True when :meth:`exchange` has something to do."""
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            raise ConfigError(f"samples must be a whole number of at least 1, not {samples!r}: count the samples of the optimizer step")
        replica = self._joined()
        replica.count(steps, samples)
        return self._attention or replica.total.steps >= self._next_due

    def exchange(self) -> None:
        """The second half of :meth:`step`: adopt and contribute what is due, at a step boundary."""
        self._boundary(self._joined())

    def __enter__(self) -> Self:
        self._joined()
        self._membership.state = "training"
        self._engine.wake("heartbeat")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.leave()

    def _joined(self) -> Replica:
        if self._closed or self._replica is None:
            raise GradientMailError(f"the session of {self.learner_id!r} is closed: construct a new one to join again")
        return self._replica

    def _attend(self) -> None:
        self._attention = True
        self._changed.set()

    def _boundary(self, replica: Replica) -> None:
        began = self._clock.monotonic()
        if self._membership.state == "joining":
            self._membership.state = "training"
            self._engine.wake("heartbeat")
        self._measure_pace(replica, began)
        self._exchange(replica)
        if self.algorithm.blocking:
            self._await_commits(replica, began + self._settings.step_timeout)
        self._next_due = 0 if self.algorithm.samples_due(1) is not None else replica.next_step_due()
        self._boundary_at = self._clock.monotonic()
        self._stall_seconds += self._boundary_at - began

    def _exchange(self, replica: Replica) -> None:
        """Adopt first, then contribute."""
        self._attention = False
        self._engine.raise_failure()
        for fragment in replica.fragments:
            if fragment.staged is not None or fragment.reset:
                replica.adopt(fragment)
        taken = [fragment for fragment in replica.fragments if replica.due(fragment)]
        for fragment in taken:
            replica.contribute(fragment, uuid4().hex)
        if taken:
            self._engine.wake("publisher")
        if any(fragment.staged is not None for fragment in replica.fragments):
            self._engine.wake("aligner")  # to prepare it against what has just changed
        self._warn_if_stale(replica)

    def _warn_if_stale(self, replica: Replica) -> None:
        """Own steps on an old base make staleness; waiting adds none. It is said and counted, and nothing is lost."""
        steps, limit = replica.staleness_steps(), self.algorithm.max_staleness * self.algorithm.sync_every
        if steps > limit and not self._stale:
            replica.tally.stale_warnings += 1
            log.warning(
                "%s has made %d steps on a base that the run has left or is about to leave, more than %d cycles: "
                "its uploads or the merging are slower than its cycles. A longer sync_every or a smaller wire format helps",
                self.learner_id,
                steps,
                self.algorithm.max_staleness,
            )
        self._stale = steps > limit

    def _await_commits(self, replica: Replica, deadline: float) -> None:
        while any(fragment.pending is not None for fragment in replica.fragments):
            if self._clock.monotonic() >= deadline:
                raise RunTimeout(
                    f"{self.learner_id}: {type(self.algorithm).__name__} waited {self._settings.step_timeout:g} s for a round of "
                    f"{self.algorithm.quorum} learners; {self._membership.who_is_there()}. Start the missing ones, or use DecoupledDiLoCo"
                )
            self._clock.wait(self._changed, self._pace().poll_interval)
            self._changed.clear()
            self._exchange(replica)

    def _measure_pace(self, replica: Replica, now: float) -> None:
        steps = replica.total.steps - self._boundary_step
        if steps:
            pace = (now - self._boundary_at) / steps
            self._seconds_per_step = pace if self._seconds_per_step == 0 else 0.5 * (self._seconds_per_step + pace)
        self._boundary_step = replica.total.steps

    def _pace(self) -> Pace:
        cycle_s = self._seconds_per_step * self.algorithm.sync_every or math.inf  # as yet unknown
        return Pace(seconds_per_step=self._seconds_per_step, poll_interval=self._settings.look_interval(cycle_s))

    # --- leaving ---------------------------------------------------------------------------------------

    def close(self, timeout: float = 600.0, *, leave_timeout: float = 10.0) -> None:
        """Leave the run once everything this learner has done is in a commit.

        Raises :class:`RunTimeout` after ``timeout`` seconds, naming what it was waiting for; the session is then
        closed all the same. Interrupted (Ctrl-C), it goes on as :meth:`leave` for ``leave_timeout`` seconds.
        Closing twice does nothing.
        """
        if self._closed:
            return
        try:
            missing = self._finish(timeout)
        except GradientMailError:
            self._end()
            raise
        except BaseException:
            self.leave(leave_timeout)
            raise
        self._end()
        if missing:
            there = self._membership.who_is_there()
            raise RunTimeout(f"{self.learner_id} left after {timeout:g} s without {missing} (quorum: {self.algorithm.quorum}); {there}")

    def leave(self, timeout: float = 10.0, *, contribute: bool = True) -> None:
        """Leave the run, publishing what can be published within ``timeout`` seconds. Never raises for the rest.

        ``contribute=False`` only waits for what is on its way, where the parameters cannot be read any more. Where
        the mailbox does not answer, ending the threads takes up to ``timeout`` seconds more.
        """
        if self._closed:
            return
        try:
            missing = self._finish(timeout, contribute=contribute)
            if missing:
                log.warning("%s leaves without %s", self.learner_id, missing)
        except GradientMailError as error:
            log.warning("%s leaves the run after an error: %s", self.learner_id, error)
        finally:
            self._end(min(STOP_SECONDS, timeout))

    def _finish(self, timeout: float, *, contribute: bool = True) -> str:
        replica = self._joined()
        leaving = Leaving(
            replica,
            self._engine,
            self._membership,
            self.algorithm,
            exchange=lambda: self._exchange(replica),
            changed=self._changed,
            pace=self._pace,
            clock=self._clock,
        )
        return leaving.finish(timeout, contribute=contribute)

    def _end(self, timeout: float = STOP_SECONDS) -> None:
        self._closed = True
        self._membership.state = "ended"
        self._engine.stop(timeout)

    # --- figures ---------------------------------------------------------------------------------------

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""
        return tuple(fragment.version for fragment in self._replica.fragments) if self._replica else ()

    def stats(self) -> Stats:
        """Figures so far; also after the session has been closed."""
        assert self._replica is not None
        return Stats(
            learner_id=self.learner_id,
            steps=self._replica.total.steps,
            samples=self._replica.total.samples,
            versions=self.versions,
            learners=self._replica.learners,
            tally=self._replica.tally,
            staleness_steps=self._replica.staleness_steps(),
            stall_seconds=self._stall_seconds,
            seconds_per_step=self._seconds_per_step,
            usage=self._mailbox.usage,
        )

    def _progress(self) -> Progress:
        if self._replica is None:
            return Progress(usage=self._mailbox.usage)
        return Progress(
            steps=self._replica.total.steps,
            samples=self._replica.total.samples,
            seconds_per_step=self._seconds_per_step,
            uplink=self._engine.publisher.uplink,
            versions=tuple(fragment.known for fragment in self._replica.fragments),
            stall_seconds=self._stall_seconds,
            staleness_steps=self._replica.staleness_steps(),
            discarded_steps=self._replica.tally.discarded_work.steps,
            usage=self._mailbox.usage,
        )
