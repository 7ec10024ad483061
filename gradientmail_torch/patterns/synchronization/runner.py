"""Bringing one node to its outcome: whoever finds it complete runs it, as leased work."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.errors import ConfigError, MailboxError, WorkFailed, WorkFenced
from gradientmail_torch.patterns.leased_work import Claim, LeasedWork, Outcome, Status
from gradientmail_torch.patterns.synchronization.dag import decide
from gradientmail_torch.patterns.synchronization.ledger import Call, Ledger, Marker
from gradientmail_torch.patterns.synchronization.payload import PayloadRef, load, store
from gradientmail_torch.patterns.synchronization.turns import Turns

Function = Callable[[dict[str, object], "Invocation"], object]
"""Gets the payloads of the predecessors that called, in declared order, and the invocation. An open file that it
returns is closed when it has been sent."""

Invoke = Callable[[str, object, bool], Call]

log = logging.getLogger(__name__)

_MAX_ERROR_CHARS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome that a node's run committed; the same for every party."""

    node: str
    status: Status
    """``done`` or ``skipped``; a failed one is raised as :class:`~gradientmail_torch.errors.WorkFailed`."""
    value: object
    """What the function returned; a file as :class:`StoredFile`. None when skipped."""
    attempt: int
    """The attempt that finished; 0 when nothing was run."""
    owner: str
    """Who finished it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What a node's function may know about its own run."""

    node: str
    attempt: int
    """Counts from 1; the fencing token for whatever the function writes elsewhere."""
    skipped: tuple[str, ...]
    """Predecessors that did not call."""
    _work: LeasedWork = field(repr=False)
    _claim: Claim = field(repr=False)
    _invoke: Invoke | None = field(default=None, repr=False)

    def is_fenced(self) -> bool:
        """Whether another party has taken this run over, so that going on is in vain: two requests."""
        return self._work.is_fenced(self._claim)

    def invoke(self, successor: str, payload: object = None, *, conditional: bool = True) -> Call:
        """Call a successor in the workflow now, or skip it where ``conditional`` is false.

        Successors that the function does not call itself are called with what it returns.
        """
        if self._invoke is None:
            raise ConfigError(f"node {self.node!r} stands alone: only a node of a Workflow has successors")
        return self._invoke(successor, payload, conditional)


class Runner:
    """Bounded steps towards the outcome of a node. Any number of parties may step at once."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.turns = Turns(ledger.dag)
        self._missing: dict[str, str] = {}
        self._complete: set[str] = set()
        self._runnable: set[str] = set()

    def call(self, node: str, by: str, payload: object) -> bool:
        """True when this call is the one that stands."""
        return self._reach(node, by, lambda: self.ledger.call(node, by, payload))

    def skip(self, node: str, by: str) -> bool:
        """True when this skip is what stands."""
        return self._reach(node, by, lambda: self.ledger.skip(node, by))

    def _reach(self, node: str, by: str, mark: Callable[[], bool]) -> bool:
        self.ledger.dag.check(node, by)
        missing = self._missing_besides(node, by)
        if accepted := mark():
            self.turns.called(node, by, last=missing is None)
        self.note(node, missing)
        return accepted

    def _missing_besides(self, node: str, by: str) -> str | None:
        """Another predecessor than ``by`` that has not reached ``node``; one GET if the one that was missing still is."""
        known = self._missing.get(node)
        if known is not None and known != by and not self.ledger.has_reached(node, known):
            return known
        return next((name for name in self.ledger.missing(node) if name != by), None)

    def is_complete(self, node: str) -> bool:
        """Whether every predecessor has reached ``node``: one GET while the one that was missing still is."""
        if node in self._complete:
            return True
        missing = self._missing.get(node)
        if missing is not None and not self.ledger.has_reached(node, missing):
            return False
        if left := self.ledger.missing(node):
            self._missing[node] = left[0]
            return False
        self._complete.add(node)
        return True

    def note(self, node: str, missing: str | None) -> None:
        """What a listing has told about ``node``: a predecessor that is missing, or that none is."""
        if missing is None:
            self._complete.add(node)
        else:
            self._missing[node] = missing

    def step(
        self, work: LeasedWork, node: str, function: Function | None, invoke: Invoke | None = None, *, in_turn: bool = False
    ) -> Outcome | None:
        """The outcome of ``node``, made here if nobody is at it; None while there is none. ``in_turn``: see :class:`Turns`.

        What the function raises becomes the outcome ``failed``. Raises :class:`WorkFenced` when the function
        ran here and another attempt had finished first. Without a function, a node is still skipped or failed
        where that is what its predecessors make of it.
        """
        if (outcome := work.outcome(node)) is not None:
            return outcome
        if not self.is_complete(node):
            return None
        if function is None:
            return self._settle_without_running(work, node)
        if in_turn and not self.turns.has_come(node):
            return None
        # A look first: of many parties that find the node complete, few then pay for a claim that is refused.
        match work.claim(node) if work.is_free(node) else None:
            case Claim() as claim:
                return self._execute(work, claim, function, invoke)
            case found:
                return found

    def _settle_without_running(self, work: LeasedWork, node: str) -> Outcome | None:
        if node in self._runnable:  # markers do not change
            return None
        markers = self.ledger.markers(node)
        outcome = self._without_running(work, node, markers)
        if outcome is None:
            self._runnable.add(node)
        return outcome

    def _execute(self, work: LeasedWork, claim: Claim, function: Function, invoke: Invoke | None) -> Outcome:
        node = claim.item
        markers = self.ledger.markers(node)
        if (outcome := self._without_running(work, node, markers, claim)) is not None:
            return outcome
        data = {name: self._payload(node, name, marker.payload) for name, marker in markers.items() if marker.payload is not None}
        skipped = tuple(name for name, marker in markers.items() if marker.reached == "skipped")
        invocation = Invocation(node=node, attempt=claim.attempt, skipped=skipped, _work=work, _claim=claim, _invoke=invoke)
        key = self.ledger.keys.result(node, claim.nonce)
        try:
            value = function(data, invocation)
            with contextlib.closing(value) if isinstance(value, io.IOBase) else contextlib.nullcontext():
                ref = store(self.ledger.mailbox, value, lambda: key, what=f"what the function of {node!r} returned")
        except MailboxError:  # the store's failure is not the function's
            raise
        except Exception as error:
            log.exception("the function of %r failed", node)
            return work.finish(claim, status="failed", error=_shown(error))
        try:
            outcome = work.finish(claim, value=msgspec.Raw(messages.encode(ref)))
        except WorkFenced:
            if ref.data is not None:  # the winner's outcome has been read, and it is not this one
                self.ledger.mailbox.delete(key)
            raise
        self.ledger.check_expired()
        return outcome

    def _without_running(self, work: LeasedWork, node: str, markers: dict[str, Marker], claim: Claim | None = None) -> Outcome | None:
        match decide((marker.reached for marker in markers.values()), self.ledger.dag.triggers[node]):
            case "run":
                return None
            case "skipped":
                return work.decide(node, status="skipped", claim=claim)
            case "failed":
                return work.decide(node, status="failed", error=_inherited(markers), claim=claim)

    def _payload(self, node: str, by: str, ref: PayloadRef) -> object:
        return load(self.ledger.mailbox, ref, what=f"the payload of {by!r} for {node!r}")

    def result(self, outcome: Outcome) -> Result:
        """Raises :class:`WorkFailed` with the traceback when the run failed or no attempt finished."""
        if outcome.status in ("failed", "abandoned"):
            raise WorkFailed(
                f"node {outcome.item!r} of {self.ledger.keys.root!r} in {self.ledger.mailbox!r} {outcome.status}: {outcome.error}"
            )
        ref = payload_of(outcome)
        value = None if ref is None else load(self.ledger.mailbox, ref, what=f"the outcome of {outcome.item!r}")
        return Result(node=outcome.item, status=outcome.status, value=value, attempt=outcome.attempt, owner=outcome.owner)


def payload_of(outcome: Outcome) -> PayloadRef | None:
    """What a node's function returned; None when it did not run to its end."""
    if outcome.status != "done":
        return None
    return messages.decode(PayloadRef, bytes(outcome.value), key=f"the outcome of {outcome.item!r}")


def _inherited(markers: dict[str, Marker]) -> str:
    return "\n".join(f"its predecessor {name!r} failed: {marker.error}" for name, marker in markers.items() if marker.reached == "failed")[
        -_MAX_ERROR_CHARS:
    ]


def _shown(error: BaseException) -> str:
    return messages.writable("".join(traceback.format_exception(error))[-_MAX_ERROR_CHARS:])
