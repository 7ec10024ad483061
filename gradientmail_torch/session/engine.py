"""The background half of a session: the workers, and who wakes whom.

::

    training thread ──contribute──▶ publisher ──record──▶ mailbox
          ▲                            │ delta known        │ rounds listed
          │ adopt                      ▼                    ▼
          └────────prepared──────── aligner ◀──hint────── syncer ──commit──▶ mailbox
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms.adoption import Outcome
from gradientmail_torch.algorithms.algorithm import Algorithm, Pace
from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import BackgroundFailure, GradientMailError, LearnerFenced
from gradientmail_torch.messages import Commit
from gradientmail_torch.session.aligner import Aligner
from gradientmail_torch.session.delegate import Delegate
from gradientmail_torch.session.membership import Membership
from gradientmail_torch.session.merger import Merger
from gradientmail_torch.session.publisher import Publisher
from gradientmail_torch.session.replica import Fragment, Replica
from gradientmail_torch.session.retention import Retention
from gradientmail_torch.session.round_listing import is_large
from gradientmail_torch.session.run import Run
from gradientmail_torch.session.settings import Settings
from gradientmail_torch.session.syncer import Signals, Syncer
from gradientmail_torch.session.whole_writer import WholeWriter
from gradientmail_torch.session.worker import Worker

log = logging.getLogger(__name__)


class Engine:
    """Owns every background thread of a session.

    Args:
        attend: called when the training thread should look at the next step boundary.
    """

    def __init__(self, membership: Membership, *, settings: Settings, clock: Clock, attend: Callable[[], None]) -> None:
        self.failure: Exception | None = None
        self._membership = membership
        self._settings = settings
        self._clock = clock
        self._attend = attend
        self._workers: dict[str, Worker] = {}
        self._replica: Replica | None = None
        self._start("heartbeat", membership.beat)

    def start(self, run: Run, replica: Replica, algorithm: Algorithm, *, pace: Callable[[], Pace]) -> None:
        """Begin to publish, align, watch and merge."""
        settings, clock, life = self._settings, self._clock, self._membership.life
        self._replica = replica
        self._retention = Retention(
            run,
            keep=settings.keep,
            keep_seconds=settings.keep_seconds,
            last_whole=algorithm.last_whole,
            live=self._membership.live,
            large=lambda: is_large(len(self._membership.peers), len(replica.fragments)),
            clock=clock,
        )
        self.publisher = Publisher(
            run,
            replica,
            life,
            poll_interval=settings.longest_look,
            clock=clock,
            encoded=lambda: self.wake("aligner"),
            unsound=self._attend,
        )
        self.aligner = Aligner(run, replica, clock=clock, pace=pace, prepared=self._attend, advanced=self._advanced)
        self.whole_writer = WholeWriter(
            run, replica, uplink=lambda: self.publisher.uplink, poll_interval=settings.longest_look, clock=clock
        )
        merger = Merger(
            run,
            replica,
            algorithm,
            self._retention,
            life,
            clock=clock,
            committed=self._committed,
            hinted=lambda: self.wake("aligner"),
        )
        self.syncer = Syncer(
            run,
            replica,
            algorithm,
            Delegate(run, replica, algorithm, life),
            merger,
            life,
            settings=settings,
            clock=clock,
            membership=self._membership,
            pace=pace,
            signals=Signals(
                called=self._attend,
                hinted=lambda: self.wake("aligner"),
                lost=lambda: self.wake("publisher"),
            ),
        )
        self._start("observer", self._observe)
        self._start("publisher", self.publisher.tick)
        self._start("aligner", self.aligner.tick)
        self._start("syncer", self.syncer.tick)
        self._start("whole-writer", self.whole_writer.tick)

    def wake(self, *names: str) -> None:
        for name in names:
            if worker := self._workers.get(name):  # none any more when a tick outlives the session
                worker.wake()

    def raise_failure(self) -> None:
        """What has gone wrong in the background: :class:`LearnerFenced`, or :class:`BackgroundFailure`."""
        if isinstance(self.failure, LearnerFenced):
            raise self.failure
        if self.failure is not None:
            learner_id = self._membership.life.learner_id
            raise BackgroundFailure(f"the session of {learner_id!r} cannot go on: {self.failure}") from self.failure

    def next_tick(self, name: str) -> Callable[[], bool]:
        """See :meth:`Worker.next_tick`."""
        return self._workers[name].next_tick()

    def stop(self, timeout: float) -> None:
        """End all workers and publish the last beat, which carries the membership's final state; takes ``timeout`` at most."""
        for worker in self._workers.values():
            worker.stop()
        deadline = self._clock.monotonic() + timeout
        for name, worker in self._workers.items():
            if not worker.join(max(0.1, deadline - self._clock.monotonic())):
                log.warning("the %s of %s is still busy with the mailbox; it ends with the process", name, self._membership.life.learner_id)
        self._workers.clear()
        if self.failure is None:
            goodbye = self._clock.spawn(self._say_goodbye, name=f"gradientmail-goodbye-{self._membership.life.learner_id}")
            if not goodbye.join(max(0.1, deadline - self._clock.monotonic())):
                log.warning("the mailbox takes no goodbye, so the others wait for this learner's lease")

    def _say_goodbye(self) -> None:
        try:
            self._membership.beat()
        except GradientMailError as error:
            log.warning("could not say goodbye, so the others may wait for this learner's lease: %s", error)

    def _start(self, name: str, tick: Callable[[], float]) -> None:
        self._workers[name] = Worker(
            f"gradientmail-{name}-{self._membership.life.learner_id}",
            tick,
            clock=self._clock,
            outage_timeout=self._settings.outage_timeout,
            on_failure=self._fail,
        )

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        log.error("%s: a background thread failed: %s", self._membership.life.learner_id, error)
        self._attend()

    def _observe(self) -> float:
        pause = self._membership.observe()
        assert self._replica is not None
        self._replica.learners = self._membership.training()
        for fragment in self._replica.fragments:
            with self._replica.lock:
                fragment.hint = max(fragment.hint, self._membership.version_hint(fragment.index))
        return pause

    def _committed(self, fragment: Fragment, commit: Commit, values: list[Tensor]) -> None:
        self.aligner.accept(fragment, commit, values)
        self.whole_writer.offer(fragment, commit, values)
        self.wake("whole-writer")

    def _advanced(self, fragment: Fragment) -> None:
        """A commit has been read: late contributions go into the next round, and its round is no longer open."""
        self._retention.note(fragment.index, fragment.known)
        self.wake("publisher")
        self._attend()
        pending = fragment.pending
        if pending is not None and pending.outcome is not Outcome.OPEN:
            self._retention.settled(keys.contribution(fragment.index, pending.version, self._membership.life.learner_id))
