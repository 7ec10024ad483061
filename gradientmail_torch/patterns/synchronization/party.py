"""One party of a workflow or of a node that stands alone, and how it waits."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass

from gradientmail_torch.clock import Clock
from gradientmail_torch.errors import ConfigError, CorruptObject, RunTimeout
from gradientmail_torch.keys import SyncKeys, check_learner_id
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox, open_mailbox
from gradientmail_torch.patterns.beat_helper import check_url
from gradientmail_torch.patterns.heartbeat import Attentive, Watch
from gradientmail_torch.patterns.leased_work import LeasedWork
from gradientmail_torch.patterns.synchronization.dag import Dag
from gradientmail_torch.patterns.synchronization.ledger import Ledger
from gradientmail_torch.patterns.synchronization.runner import Function, Invoke, Result, Runner
from gradientmail_torch.presence import waiting

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    lease: float
    """Seconds."""
    poll_interval: float
    """Seconds."""
    max_attempts: int | None
    outage_timeout: float
    """Seconds."""
    max_freeze: float = 0.0
    """Seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.poll_interval <= self.lease / 4:
            raise ConfigError(
                f"poll_interval must be above 0 and at most a quarter of the lease of {self.lease} seconds, not {self.poll_interval}"
            )


class Party:
    """Opens the ledger, steps nodes and waits for them."""

    REPORT_EVERY_S = 30.0

    def __init__(
        self,
        mailbox: Mailbox | str | os.PathLike[str],
        keys: SyncKeys,
        dag: Dag,
        *,
        learner_id: str,
        settings: Settings,
        clock: Clock,
        rng: random.Random | None,
    ) -> None:
        self._helper_url = check_url(mailbox, settings.max_freeze)
        self._learner_id = check_learner_id(learner_id)
        self._settings = settings
        self._clock = clock
        self._rng = rng or random.Random()
        self._direct = Attentive(open_mailbox(mailbox, clock=clock), lease=settings.lease, clock=clock)
        patient = RetryingMailbox(self._direct, patience_s=settings.outage_timeout, clock=clock, rng=self._rng)
        self.ledger = Ledger(patient, keys, dag, owner=learner_id, clock=clock, rng=self._rng)
        self.runner = Runner(self.ledger)
        self._watch = Watch(patient, self._direct, lease=settings.lease, clock=clock)
        self.ledger.found()

    def work(self) -> LeasedWork:
        """Leases for the time of one call; what was seen of others is kept over calls."""
        return LeasedWork(
            self._direct,
            self.ledger.keys,
            learner_id=self._learner_id,
            lease=self._settings.lease,
            max_attempts=self._settings.max_attempts,
            outage_timeout=self._settings.outage_timeout,
            watch=self._watch,
            helper_url=self._helper_url,
            max_freeze=self._settings.max_freeze,
            clock=self._clock,
            rng=self._rng,
        )

    def wait(
        self,
        node: str,
        function: Function | None,
        timeout: float | None,
        *,
        invoke: Invoke | None = None,
        meanwhile: Callable[[LeasedWork], object] | None = None,
    ) -> Result:
        """Step ``node`` until it has an outcome; ``meanwhile`` is called at every fifth look that finds none.

        The last look before a timeout runs the node though it be another's turn.
        """
        began = reported = now = self._clock.monotonic()
        ends = math.inf if timeout is None else began + timeout
        looks = 0
        with self.work() as work, waiting(repr(self._direct), self._learner_id):
            while (outcome := self.runner.step(work, node, function, invoke, in_turn=now < ends)) is None:
                if now >= ends:
                    raise RunTimeout(f"{self.describe(node)} after {timeout:g} s. Call wait again to go on waiting")
                if now - reported >= self.REPORT_EVERY_S:
                    reported = now
                    self.ledger.check_expired()
                    log.info("%s after %.0f s", self.describe(node), now - began)
                looks += 1
                if meanwhile is not None and looks % 5 == 1:
                    meanwhile(work)
                # Who goes first looks twice as often, so that it has gone before the others think it absent.
                goes_first = function is not None and self.runner.turns.is_first(node)
                interval = self._settings.poll_interval / (2 if goes_first else 1)
                looked = self._clock.monotonic()
                # From look to look, but a store that is slow is not pressed.
                self._clock.sleep(max(0.0, min(max(now + interval, looked + interval / 2), ends) - looked))
                now = self._clock.monotonic()
        return self.runner.result(outcome)

    def result(self, work: LeasedWork, node: str) -> Result:
        """The result of a node that has ended."""
        if (outcome := work.outcome(node)) is None:
            self.ledger.check_expired()
            raise CorruptObject(f"the outcome of {node!r} in {self._direct!r} was there and is gone")
        return self.runner.result(outcome)

    def pause(self) -> None:
        self._clock.sleep(self._settings.poll_interval)

    def describe(self, node: str) -> str:
        missing = self.ledger.missing(node)
        state = (
            f"waits for {', '.join(missing[:20])}" if missing else "is complete and being run elsewhere, or nobody here has its function"
        )
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        return f"node {node!r} of {self.ledger.keys.root!r} in {self._direct!r} {state}{more}"
