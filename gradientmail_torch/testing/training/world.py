"""A simulated training from beginning to end: processes, what befalls them, and what must hold when all has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.errors import BackgroundFailure, CorruptObject, LearnerFenced, LearnerIdInUse, MailboxUnavailable, RunTimeout
from gradientmail_torch.messages import Contribution
from gradientmail_torch.session import align, lease, round_listing
from gradientmail_torch.testing.network import Event
from gradientmail_torch.testing.process import Process, SimulationError
from gradientmail_torch.testing.simulation import SimulatedCluster
from gradientmail_torch.testing.training.learner import Ending, Learner, Model, elements
from gradientmail_torch.testing.training.ledger import Ledger, is_creation
from gradientmail_torch.testing.training.liveness import Liveness
from gradientmail_torch.testing.training.scenario import LearnerPlan, Scenario, Trouble
from gradientmail_torch.testing.training.violations import Invariant, Violation

LIMIT_S = 2 * 3600.0
PATIENCE_S = 20.0
"""For which a request is tried again: the default of :class:`RetryingMailbox`."""


class World:
    def __init__(self, scenario: Scenario, cluster: SimulatedCluster) -> None:
        self.scenario = scenario
        self.cluster = cluster
        settings = scenario.settings
        self.ledger = Ledger(
            cluster.store,
            scenario.algorithm,
            keep=settings["keep"],
            now_s=lambda: cluster.now_s,
            was_silent=lambda learner_id, since_s: self.liveness.silent_since(learner_id, since_s),
        )
        self.liveness = Liveness(
            cluster.store,
            scenario.algorithm,
            lease_s=settings["lease"],
            slowest_request_s=scenario.slowest_request_s,
            now_s=lambda: cluster.now_s,
        )
        self.endings: dict[int, Ending] = {}
        """Of the processes that have closed, by their numbers."""
        self.reports: list[object] = []
        self.items = 4 * len(scenario.learners)
        self._processes: dict[str, Process] = {}
        self._arrived_at: dict[str, dict[str, float]] = {}
        self._taken: set[object] = set()
        self._rng = cluster.rng("what is spoilt")
        self.liveness.processes = self._processes
        cluster.observe(self._observed)
        for plan in scenario.learners:
            self.start(plan, steps=plan.steps, in_s=plan.starts_at_s)
        for trouble in scenario.troubles:
            cluster.at(trouble.at_s, lambda trouble=trouble: self._befall(trouble))  # type: ignore[misc]

    def run(self) -> None:
        """Until the end. Raises a :class:`Violation` of what does not hold."""
        try:
            self.cluster.run(limit_s=LIMIT_S)
        except SimulationError as error:
            raise Violation(Invariant.ENDS, str(error)) from error
        self._check_end()

    # --- processes and what befalls them ----------------------------------------------------------------

    def start(self, plan: LearnerPlan, *, steps: int, in_s: float = 0.0) -> Process:
        number = len(self.cluster.processes)

        def main() -> Ending:
            learner = Learner(self, plan, number, steps=steps)
            learner.process = process
            return learner.run()

        process = self.cluster.process(plan.name, main, delay_s=in_s)
        self._processes[str(process)] = process
        return process

    def _befall(self, trouble: Trouble) -> None:
        if trouble.what in ("alter", "remove"):
            self._spoil(trouble, until_s=self.cluster.now_s + (trouble.seconds or 10.0))
            return
        if trouble.what == "alter extras":
            self._spoil_extras(until_s=self.cluster.now_s + trouble.seconds)
            return
        if not trouble.who:
            self.cluster.outage(trouble.seconds)
            for process in self.cluster.processes:
                self.liveness.troubled(process, trouble.seconds)
            return
        plan = next(plan for plan in self.scenario.learners if plan.name == trouble.who)
        process = next(process for process in self.cluster.processes if process.name == trouble.who)
        match trouble.what:
            case "kill":
                self.cluster.kill(process)
            case "pause" if process.alive:
                self.cluster.pause(process, trouble.seconds, clock_stops=trouble.clock_stops)
                self.liveness.troubled(process, trouble.seconds)
            case "outage":
                self.cluster.outage(trouble.seconds, process)
                self.liveness.troubled(process, trouble.seconds)
            case "double":
                self.start(plan, steps=plan.steps)
        if trouble.restart_after_s is not None:
            self.start(plan, steps=plan.steps // 2 + 1, in_s=trouble.restart_after_s)

    def _spoil(self, trouble: Trouble, until_s: float) -> None:
        """Alter or remove the data of one contribution of a learner in an open round, or of all that come meanwhile."""
        found = [
            record.data.key
            for (fragment, version), records in self.ledger.records.items()
            for record in records.values()
            if version > self.ledger.newest.get(fragment, 0) and record.learner_id == (trouble.who or record.learner_id)
        ]
        for key in self._rng.sample(found, min(1, len(found))) if trouble.who else found:
            if key not in self.ledger.spoilt:
                self._spoil_object(key, trouble.what)
        if self.cluster.now_s < until_s and not (trouble.who and found):
            self.cluster.at(0.2, lambda: self._spoil(trouble, until_s))

    def _spoil_extras(self, until_s: float) -> None:
        """Alter each whole value that has followed its commit, and all sums ahead of a merge."""
        wholes = {commit.whole.key for commit in self.ledger.commits.values() if commit.whole is not None}
        for key in sorted((wholes | self.ledger.partials.keys()) - self.ledger.spoilt):
            if self.cluster.store.get(key) is not None:
                self._spoil_object(key, "alter")
        if self.cluster.now_s < until_s:
            self.cluster.at(0.2, lambda: self._spoil_extras(until_s))

    def _spoil_object(self, key: str, how: str) -> None:
        self.ledger.spoilt.add(key)
        if how == "remove":
            self.cluster.store.delete(key)
        elif (data := self.cluster.store.get(key)) is not None:
            self.cluster.store.put(key, data[:-1] + bytes([data[-1] ^ 1]))

    def _observed(self, event: Event) -> None:
        self.ledger.observed(event)
        self.liveness.observed(event)
        if is_creation(event):
            if event.key.startswith("commits/"):
                fragment, version, _ = keys.parse_round(event.key)
                self.liveness.committed(event, self.ledger.recorded_at[fragment, version])
            elif event.key.startswith(keys.BARRIERS):
                name = keys.segment_below(keys.BARRIERS, event.key)
                self._arrived_at.setdefault(name, {})[keys.last_segment(event.key)] = event.at_s

    # --- what learners say ------------------------------------------------------------------------------

    def check_error(self, learner: Learner, error: Exception) -> None:
        """A life may end by a stated error, where there is reason for it."""
        process, scenario = learner.process, self.scenario
        outages = [trouble for trouble in scenario.troubles if trouble.what == "outage"]
        match error:
            case CorruptObject():
                fair = False
            case LearnerIdInUse():
                fair = self.liveness.has_rival(process)
            case LearnerFenced():
                life = learner.session._membership.life if learner.session else None
                fair = life is not None and len(self.liveness.lives[life.learner_id]) > life.generation
            case BackgroundFailure():
                away = any(trouble.seconds > scenario.settings["outage_timeout"] for trouble in outages)
                fair = away and isinstance(error.__cause__, MailboxUnavailable)
            case RunTimeout():
                fair = learner.plan.stuck or scenario.blocking
            case _:
                network = scenario.conditions
                fair = bool(outages or network.refused_share or network.lost_share or network.late_share)
        if not fair:
            raise Violation(Invariant.ENDS, f"{process} ended without reason by {type(error).__name__}: {error}") from error

    def passed_barrier(self, name: str, parties: int, found: Sequence[str]) -> None:
        arrived = self._arrived_at.get(name, {})
        if len(arrived) < parties or not {*found} <= {*arrived} or len(found) < parties:
            raise Violation(Invariant.BARRIER, f"{name} let one of {parties} pass, told of {found}, when {sorted(arrived)} were there")

    def missed_barrier(self, learner: Learner, name: str, parties: int) -> None:
        if any(trouble.who in ("", learner.plan.name) for trouble in self.scenario.troubles):
            return
        before_s = self.cluster.now_s - PATIENCE_S - 2 * self.scenario.slowest_request_s - 2.0
        arrived = [who for who, at_s in self._arrived_at.get(name, {}).items() if at_s < before_s]
        if len(arrived) >= parties:
            raise Violation(Invariant.BARRIER, f"{name} held {learner.process} back, though {arrived} had long arrived")

    def taken(self, item: object) -> None:
        self._taken.add(item)

    def closed(self) -> int:
        """How many processes there have been, if all of them have closed or died; otherwise 0."""
        processes = self.cluster.processes
        return len(processes) if all(not process.alive or process.number in self.endings for process in processes) else 0

    def aligned(self, who: str, versions: tuple[int, ...], values: Sequence[Sequence[Tensor]], *, closed: int) -> None:
        """``closed`` is what :meth:`closed` said before."""
        newest = tuple(self.ledger.newest.get(fragment, 0) for fragment in range(len(versions)))
        if closed == len(self.cluster.processes) and versions != newest:
            raise Violation(Invariant.ALIGNED, f"{who} loads {versions} when all have closed at {newest}")
        for fragment, (version, of_fragment) in enumerate(zip(versions, values, strict=True)):
            self.ledger.check_values(who, fragment, version, of_fragment)

    # --- the end ----------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        if self.ledger.manifest is not None:
            model = Model(len(self.ledger.manifest.layout), 0.0, elements=elements(self.scenario.algorithm))
            versions = align(model, mailbox=self.cluster.store)
            self.aligned("a reader", versions, [[parameter.detach()] for parameter in model.parameters()], closed=self.closed())
        for record in self._open_records():
            life = self._process_of(record)
            if life.number in self.endings:
                raise Violation(Invariant.COMPLETE, f"{life} has closed, and its contribution {record.nonce} is in no commit")
        self._check_last_rounds()
        if self.endings and self.scenario.queue and self._taken != {*range(self.items)}:
            raise Violation(Invariant.COMPLETE, f"of {self.items} items only {self._taken} were worked on")
        if any(report != self.reports[0] for report in self.reports):
            raise Violation(Invariant.ALIGNED, f"the reports differ: {self.reports}")

    def _open_records(self) -> list[Contribution]:
        """Contributions that are in no commit, nor left out of one."""
        ledger = self.ledger
        settled = ledger.merged.keys() | ledger.left_out.keys()
        return [record for records in ledger.records.values() for record in records.values() if record.nonce not in settled]

    def _process_of(self, record: Contribution) -> Process:
        return self.liveness.lives[record.learner_id][record.generation - 1]

    def _check_last_rounds(self) -> None:
        """Whoever closes last commits every open round, also those that the dead have left."""
        last = max(self.cluster.processes, key=lambda process: process.died_at_s)
        ending = self.endings.get(last.number)
        others_s = max((process.died_at_s for process in self.cluster.processes if process.number not in self.endings), default=0.0)
        noticed_s = 2 * self.scenario.settings["lease"] + PATIENCE_S + 2 * self.scenario.slowest_request_s
        if ending is None or ending.at_s < others_s + noticed_s:
            return
        for (fragment, version), recorded_at in self.ledger.recorded_at.items():
            if version > self.ledger.newest.get(fragment, 0) and min(recorded_at.values()) < ending.closing_began_s:
                raise Violation(
                    Invariant.COMPLETE,
                    f"{last} was the last to close, and left version {version} of fragment {fragment} open: {recorded_at}",
                )


def simulate(seed: int, *, scenario: Scenario | None = None, on_event: Callable[[Event], object] | None = None) -> World:
    """One training on a simulated cluster. Raises a :class:`Violation`, with scenario and trace, when an invariant is broken.

    ``on_event`` is called with every line of the trace, when all is over. What the session says in its log is not
    shown: it speaks of every fault.
    """
    scenario = scenario or Scenario.draw(seed)
    with _silence(), _machines(), _listing(scenario), SimulatedCluster(seed, conditions=scenario.conditions) as cluster:
        world = World(scenario, cluster)
        try:
            world.run()
        except BaseException as error:
            error.add_note(f"{scenario}\npython -m gradientmail_torch.testing.explore --trace {seed}")
            raise
        finally:
            if on_event is not None:
                for event in cluster.log:
                    on_event(event)
        return world


@contextmanager
def _silence() -> Iterator[None]:
    logger = logging.getLogger("gradientmail_torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _listing(scenario: Scenario) -> Iterator[None]:
    """In a large run, as few learners as there are take themselves for many."""
    real = round_listing.LISTED_WHOLLY
    vars(round_listing).update(LISTED_WHOLLY=0 if scenario.large else real)
    try:
        yield
    finally:
        vars(round_listing).update(LISTED_WHOLLY=real)


@contextmanager
def _machines() -> Iterator[None]:
    """Lives of which nobody can tell what machine they are on, and whose records do not differ from run to run."""
    real = vars(lease)["machine"], vars(lease)["os"]
    vars(lease).update(machine=lambda: "", os=SimpleNamespace(getpid=lambda: 1))
    try:
        yield
    finally:
        vars(lease).update(machine=real[0], os=real[1])
