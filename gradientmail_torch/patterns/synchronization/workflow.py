"""Synchronization nodes tied together: what one node returns or skips reaches every node below it."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock, check_timeout
from gradientmail_torch.errors import ConfigError, RunTimeout, WorkFenced
from gradientmail_torch.keys import ReachedKey, SyncKeys
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.leased_work import LeasedWork, Outcome
from gradientmail_torch.patterns.synchronization.dag import START, Dag, Trigger
from gradientmail_torch.patterns.synchronization.ledger import Call, Marker
from gradientmail_torch.patterns.synchronization.party import Party, Settings
from gradientmail_torch.patterns.synchronization.runner import Function, Invoke, Result, payload_of

_LOOKS = 5
"""Looks at the front of a workflow between two at all of it."""
_FRONT = 10


class _View(NamedTuple):
    """The nodes without an outcome, from top to bottom."""

    waiting: list[str]
    """Those that a predecessor has not reached."""
    ready: list[str]

    @property
    def open(self) -> set[str]:
        return {*self.waiting, *self.ready}


class Workflow:
    """A directed acyclic graph of nodes, each of which runs once when all its predecessors have reached it.

    ::

        workflow = Workflow({"plan": ["train", "probe"], "train": ["evaluate"], "probe": ["evaluate"]}, mailbox=box, learner_id="node-0",
                            run_id="r7", functions={"train": train, "probe": probe, "evaluate": evaluate})
        workflow.invoke("train", settings, by="plan")
        workflow.invoke("probe", settings, by="plan", conditional=accuracy > 0.5)    # False: the skip travels down
        results = workflow.run(timeout=3600)        # on every machine: runs what is complete, and what a dead machine left

    A predecessor may be a function that the workflow runs, whose return value goes to every successor that it did
    not invoke itself (``invocation.invoke``), or the caller's own code, which invokes ``by`` its name. A node
    without predecessors is invoked without ``by``. The first call of a predecessor stands, so everything may be
    repeated. A node that is skipped skips its successors; one that fails fails them. There is no leader and no
    state besides the mailbox: any party may die between any two operations, and :meth:`run` or :meth:`resume` on
    another machine goes on.

    Args:
        edges: from each node to its successors.
        mailbox: the run's mailbox, or its URL.
        learner_id: who this is.
        run_id: serves once; another graph under the same one is refused with :class:`RunMismatch`.
        functions: what this party can run, by node.
        triggers: by node, where it is not ``any_called``.
        lease, poll_interval, max_attempts, outage_timeout, max_freeze: as for :class:`SynchronizationNode`.
    """

    def __init__(
        self,
        edges: Mapping[str, Sequence[str]],
        mailbox: Mailbox | str | os.PathLike[str],
        learner_id: str,
        *,
        run_id: str = "run",
        functions: Mapping[str, Function] | None = None,
        triggers: Mapping[str, Trigger] | None = None,
        lease: float = 60.0,
        poll_interval: float = 1.0,
        max_attempts: int | None = 5,
        outage_timeout: float = 600.0,
        max_freeze: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
    ) -> None:
        self.dag = Dag.of_edges(edges, triggers)
        self._functions = dict(functions or {})
        for node in self._functions:
            self._check_node(node)
        self._clock = clock
        self._party = Party(
            mailbox,
            SyncKeys.of_workflow(run_id),
            self.dag,
            learner_id=learner_id,
            settings=Settings(
                lease=lease,
                poll_interval=poll_interval,
                max_attempts=max_attempts,
                outage_timeout=outage_timeout,
                max_freeze=max_freeze,
            ),
            clock=clock,
            rng=rng,
        )

    def invoke(self, node: str, payload: object = None, *, by: str | None = None, conditional: bool = True) -> Call:
        """Call ``node`` as its predecessor ``by``; where ``conditional`` is false, say that it will not be called.

        A skip that decides nodes below is carried down to them before this returns; should this party die on the
        way, any other's :meth:`run`, :meth:`resume` or :meth:`wait` goes on with it.
        """
        by = START if by is None else by
        if conditional:
            accepted = self._party.runner.call(node, by, payload)
        else:
            accepted = self._party.runner.skip(node, by)
            with self._party.work() as work:
                self._propagate(work)
        return Call(accepted, self._party.runner.is_complete(node))

    def skip(self, node: str, *, by: str | None = None) -> Call:
        """Say that ``by`` will not call ``node``."""
        return self.invoke(node, by=by, conditional=False)

    def resume(self) -> list[str]:
        """Run whatever is complete and has nobody at it, and carry results down, until nothing is left to do now.

        Returns the nodes that ended meanwhile, most of them by running here. Waits for nobody: call it again, or use
        :meth:`run`, to take over what a dead party holds. Failed nodes raise nothing here: see :meth:`wait`.
        """
        ran: list[str] = []
        with self._party.work() as work:
            self._settle(work, ran)
        return ran

    def run(self, timeout: float | None = None) -> dict[str, Result]:
        """:meth:`resume` until every node that nothing comes after has its outcome; returns those.

        Raises :class:`WorkFailed` when one failed, and ``TimeoutError`` after ``timeout`` seconds.
        """
        check_timeout(timeout)
        began = self._clock.monotonic()
        with self._party.work() as work:
            while True:
                view = self._settle(work)
                left = [node for node in self.dag.sinks if node in view.open]
                if not left:
                    return {node: self._party.result(work, node) for node in self.dag.sinks}
                for _ in range(_LOOKS):
                    if timeout is not None and self._clock.monotonic() - began >= timeout:
                        raise RunTimeout(f"{self._party.describe(left[0])} after {timeout:g} s. Call run again to go on")
                    self._party.pause()
                    if self._has_moved(work, view):
                        break
                self._party.ledger.check_expired()

    def wait(self, node: str, function: Function | None = None, timeout: float | None = None) -> Result:
        """Wait for the outcome of ``node``, and run its function (given here or at the start) if it falls to this party.

        As :meth:`SynchronizationNode.wait`; other nodes are not run here.
        """
        self._check_node(node)
        check_timeout(timeout)
        function = function or self._functions.get(node)
        result = self._party.wait(node, function, timeout, invoke=self._invoker(node), meanwhile=self._propagate)
        with self._party.work() as work:
            self._propagate(work)
        return result

    def _settle(self, work: LeasedWork, ran: list[str] | None = None) -> _View:
        """Carry outcomes down and run what is ready and free here, until there is nothing to do. ``ran`` gets the names."""
        while True:
            view = self._propagate(work)
            ended = self._run_ready(work, view)
            if not ended:
                return view
            if ran is not None:
                ran += ended

    def _run_ready(self, work: LeasedWork, view: _View) -> list[str]:
        """Run each ready node that has a function here and is free. Returns those that ended, by it or elsewhere."""
        ended = []
        for node in view.ready:
            try:
                if self._party.runner.step(work, node, self._functions.get(node), self._invoker(node)) is not None:
                    ended.append(node)
            except WorkFenced:  # another party was quicker: its outcome is carried down
                ended.append(node)
        return ended

    def _has_moved(self, work: LeasedWork, view: _View) -> bool:
        """Whether there is something new since ``view``: a GET or two for each node at the front, instead of listings."""
        return any(self._party.runner.is_complete(node) for node in view.waiting[:_FRONT]) or bool(self._run_ready(work, view))

    def _propagate(self, work: LeasedWork) -> _View:
        """Give every node's outcome to its successors, and decide those that need no run, from top to bottom.

        Idempotent, and right from any state that a dead party may have left. Two listings, and requests only where
        something is to be done.
        """
        ledger, runner = self._party.ledger, self._party.runner
        reached, ended = ledger.all_reached(), ledger.all_ended()
        view = _View([], [])
        for node in self.dag.order:
            if node not in ended:
                missing = next((by for by in self.dag.predecessors[node] if ReachedKey(node, by) not in reached), None)
                runner.note(node, missing)
                if missing is not None:
                    view.waiting.append(node)
                    continue
                if runner.step(work, node, None) is None:
                    view.ready.append(node)
                    continue
            owed = [name for name in self.dag.successors[node] if ReachedKey(name, node) not in reached]
            if owed and (outcome := work.outcome(node)) is not None:
                for successor in owed:
                    ledger.mark(successor, node, self._marker(outcome))
                    reached.add(ReachedKey(successor, node))
        return view

    def _marker(self, outcome: Outcome) -> Marker:
        """What ``outcome`` means to the successors; its payload is named, not copied."""
        ledger = self._party.ledger
        at = self._clock.wall()
        match outcome.status:
            case "done":
                return Marker(nonce=ledger.nonce(), reached="called", payload=payload_of(outcome), owner=ledger.owner, at=at)
            case "skipped":
                return Marker(nonce=ledger.nonce(), reached="skipped", owner=ledger.owner, at=at)
            case "failed" | "abandoned":
                return Marker(nonce=ledger.nonce(), reached="failed", error=outcome.error, owner=ledger.owner, at=at)

    def _invoker(self, node: str) -> Invoke:
        return lambda successor, payload, conditional: self.invoke(successor, payload, by=node, conditional=conditional)

    def _check_node(self, node: str) -> None:
        if node not in self.dag.predecessors:
            raise ConfigError(f"there is no node {node!r} in this workflow: the nodes are {', '.join(self.dag.order)}")
