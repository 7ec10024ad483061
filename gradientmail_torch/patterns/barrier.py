"""A point that nobody passes before a number of nodes have reached it (seed document "GradientMail: Barrier")."""

from __future__ import annotations

import contextlib
import logging
import math
import os

from gradientmail_torch import keys
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock, Reminder, check_timeout
from gradientmail_torch.errors import ConfigError, CorruptObject, InvalidName, MailboxError, MailboxUnavailable, RunTimeout
from gradientmail_torch.mailbox import Mailbox, is_signed, open_mailbox
from gradientmail_torch.mailbox.absence import Absence
from gradientmail_torch.presence import waiting

log = logging.getLogger(__name__)
MOST_DIGITS = 9
"""Of a number of parties that is believed."""


class Barrier:
    """Holds each learner at a named point until a number of them have reached it.

    An arrival is an object that is created once and never removed, and the listing of the arrivals is the
    whole state: there is no leader and nothing to recover. So a name serves once per run (a loop names each
    barrier after its iteration, ``f"epoch-{epoch}"``), a learner that restarts finds its own arrival, and one
    that comes after the barrier opened passes at once. An arrival holds how many its learner waits for: that is
    for those who look on.

    Args:
        mailbox: the run's mailbox, or its URL.
        learner_id: who arrives; the same name twice counts once.
        poll_interval: seconds between two listings.
        outage_timeout: seconds that the mailbox may be away before :meth:`wait` gives up.
    """

    REPORT_AFTER_S = 30.0
    """Seconds of waiting after which it is said who is missing; and again whenever they have doubled."""

    def __init__(
        self,
        mailbox: Mailbox | str | os.PathLike[str],
        learner_id: str,
        *,
        poll_interval: float = 1.0,
        outage_timeout: float = 600.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if not (_is_number(poll_interval) and 0 < poll_interval < math.inf):
            raise ConfigError(f"poll_interval must be a number of seconds above 0, not {poll_interval!r}")
        if not (_is_number(outage_timeout) and outage_timeout >= 0):
            raise ConfigError(f"outage_timeout must be at least 0 seconds, not {outage_timeout!r}")
        self._learner_id = keys.check_learner_id(learner_id)
        self._mailbox = open_mailbox(mailbox, clock=clock)
        self._poll_interval = poll_interval
        self._outage_timeout = outage_timeout
        self._clock = clock
        self._verified: set[str] = set()
        self._refused: set[str] = set()

    def wait(self, name: str, parties: int, timeout: float | None = None) -> list[str]:
        """Record this learner's arrival at ``name`` and wait until ``parties`` learners have arrived.

        Returns the IDs of all that had arrived when the barrier opened, at least ``parties`` of them, sorted.
        After ``timeout`` seconds it raises :class:`TimeoutError`; the arrival stays recorded, so that calling
        ``wait`` again resumes waiting. A learner's session keeps its lease meanwhile and publishes nothing new.
        """
        if isinstance(parties, bool) or not isinstance(parties, int) or parties < 1:
            raise ConfigError(f"parties must be a whole number of at least 1, not {parties!r}")
        check_timeout(timeout)
        keys.encode_name(name, what="barrier name")
        with waiting(repr(self._mailbox), self._learner_id):
            return self._wait(name, parties, timeout)

    def _wait(self, name: str, parties: int, timeout: float | None) -> list[str]:
        began, reminder = self._clock.monotonic(), Reminder(self._clock, self.REPORT_AFTER_S)
        absence = Absence(self._clock)
        arrived: list[str] = []
        while True:
            try:
                if self._learner_id not in arrived:
                    self._record(name, parties)
                arrived = self._arrived(name)
                absence.answered()
            except MailboxUnavailable as error:
                if absence.failed() > self._outage_timeout:
                    raise
                log.warning("barrier %r: the mailbox does not answer, waiting for it: %s", name, error)
            if self._learner_id in arrived and len(arrived) >= parties:
                return arrived
            now = self._clock.monotonic()
            if timeout is not None and now - began >= timeout:
                raise RunTimeout(
                    f"barrier {name!r} of {self._mailbox!r}: {len(arrived)} of {parties} learners arrived within {timeout:g} s "
                    f"({', '.join(arrived) or 'none'}); {self._missing(arrived)}. "
                    "Call wait again to go on waiting, or go on without the others"
                )
            if waited := reminder.due():
                log.warning(
                    "barrier %r: %d of %d arrived after %.0f s (%s); %s",
                    name, len(arrived), parties, waited, ", ".join(arrived) or "none", self._missing(arrived),
                )  # fmt: skip
            left = self._poll_interval if timeout is None else min(self._poll_interval, began + timeout - now)
            self._clock.sleep(left)

    def _record(self, name: str, parties: int) -> None:
        key, arrival = keys.barrier(name, self._learner_id), str(parties).encode()
        if not self._mailbox.put_if_absent(key, arrival) and is_signed(self._mailbox) and not self._genuine(key):
            self._mailbox.put(key, arrival)  # this learner alone writes there: what is in the way is a stranger's

    def _arrived(self, name: str) -> list[str]:
        found = {key: keys.parse_arrival(key) for key in self._mailbox.list(keys.barrier_prefix(name))}
        signed = is_signed(self._mailbox)
        return [learner_id for key, learner_id in found.items() if learner_id and (not signed or self._genuine(key))]

    def _missing(self, arrived: list[str]) -> str:
        """Who is missing, in words. A barrier knows a number; the names are those of the learners of the run."""
        known = set()
        try:
            for key in self._mailbox.list(keys.LEARNERS):
                with contextlib.suppress(InvalidName):  # not ours
                    known.add(keys.parse_life(key).learner_id)
        except MailboxError as error:
            return f"who is missing cannot be told: {error}"
        missing = sorted(known.difference(arrived))
        return f"of the run's learners not here: {', '.join(missing)}" if missing else "no other learner is known here"

    def _genuine(self, key: str) -> bool:
        """A name in a listing proves nothing: in a signed run an arrival counts once its object has been verified."""
        if key not in self._verified:
            try:
                self._mailbox.get(key)
            except CorruptObject as error:
                if key not in self._refused:
                    log.warning("an arrival does not count: %s", error)
                self._refused.add(key)
                return False
            self._verified.add(key)
        return True


def read_parties(mailbox: Mailbox, key: str) -> int | None:
    """For how many the learner waits whose arrival is at ``key``; None when it does not say so."""
    try:
        arrival = mailbox.get(key, length=MOST_DIGITS + 1) or b""
    except CorruptObject:
        return None
    return int(arrival) if len(arrival) <= MOST_DIGITS and arrival.isdigit() else None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
