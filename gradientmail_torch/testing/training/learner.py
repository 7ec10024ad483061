"""What a simulated process does: joins with a real session, trains a tiny model, waits at barriers, closes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from gradientmail_torch.algorithms import Algorithm
from gradientmail_torch.algorithms.quantize import BLOCK
from gradientmail_torch.errors import BackgroundFailure, CorruptObject, LearnerFenced, LearnerIdInUse, MailboxUnavailable, RunTimeout
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.patterns.queue import SharedQueue
from gradientmail_torch.patterns.synchronization import SynchronizationNode
from gradientmail_torch.session import Session, align
from gradientmail_torch.testing.faults import Interposed
from gradientmail_torch.testing.process import Process
from gradientmail_torch.testing.training.books import Books
from gradientmail_torch.testing.training.scenario import LearnerPlan

if TYPE_CHECKING:
    from gradientmail_torch.testing.training.world import World

T = TypeVar("T")

CLOSE_S = 1500.0
CLOSE_BESIDE_STUCK_S, CLOSE_STUCK_S = 800.0, 1000.0
"""The others must not need the end of one that is stuck."""
ELEMENTS = 3


def elements(algorithm: Algorithm) -> int:
    """Of each parameter: as few as will do, or a whole block of which most is left out."""
    return BLOCK["sparse"] if algorithm.wire == "sparse" else ELEMENTS


class Model(nn.Module):
    """One parameter for each fragment."""

    def __init__(self, fragments: int, start: float, *, elements: int) -> None:
        super().__init__()
        for index in range(fragments):
            self.register_parameter(f"p{index}", nn.Parameter(torch.full((elements,), start)))


@dataclass(slots=True)
class Ending:
    """How a life has ended: ``closed``, or the stated error that ended it."""

    how: str
    at_s: float
    closing_began_s: float = 0.0


class _SlowUploads(Interposed):
    """Tensors take their time; records and beats do not."""

    def __init__(self, inner: Mailbox, sleep: Callable[[float], None], seconds: float) -> None:
        super().__init__(inner)
        self._sleep, self._seconds = sleep, seconds

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        if operation == "put" and key.startswith("data/"):
            self._sleep(self._seconds)
        return carry_out()


class Learner:
    """One life of a learner, inside of its process."""

    def __init__(self, world: World, plan: LearnerPlan, number: int, *, steps: int) -> None:
        self._world = world
        self._cluster = world.cluster
        self.plan = plan
        self._steps = steps
        self._rng = world.cluster.rng(f"life {number}")
        self._box: Mailbox = world.cluster.retrying()
        if plan.upload_s:
            self._box = _SlowUploads(self._box, world.cluster.clock.sleep, plan.upload_s)
        fragments = world.scenario.algorithm.fragments or 1
        self._model = Model(fragments, float(number), elements=elements(world.scenario.algorithm))
        self._change = [self._draw_change(number) for _ in range(fragments)]
        self.process: Process
        self.session: Session | None = None

    def _draw_change(self, number: int) -> Tensor:
        """What each step does to a parameter. No two lives go the same way, and no tensor is a multiple of another's."""
        first = torch.tensor([1.0, self._rng.choice((-2.0, -1.0, 0.5)), float(number % 5)])
        count = elements(self._world.scenario.algorithm)
        # Of many elements each moves less than the one before, so that they take turns in being left out.
        return first.repeat(-(-count // ELEMENTS))[:count] * torch.linspace(1.0, 0.5, count) if count > ELEMENTS else first

    def run(self) -> Ending:
        try:
            return self._run()
        except (CorruptObject, LearnerFenced, BackgroundFailure, RunTimeout, MailboxUnavailable) as error:
            self._world.check_error(self, error)
            return Ending(type(error).__name__, self._cluster.now_s)

    def _run(self) -> Ending:
        self._join()
        session, world = self.session, self._world
        assert session is not None
        books = Books(str(self.process), session, self._model, world.ledger)
        if self.plan.stuck:
            session._engine.syncer._merger.merge = lambda *_, **__: self._cluster.clock.sleep(1e9)  # type: ignore[method-assign,assignment]
        with session:
            if world.scenario.start_barrier:
                self._wait_at("start", 60.0)
            with closing(self._work()) as work:
                for step, samples in enumerate(work):
                    self._train(books, session, step, samples)
            began_s = self._cluster.now_s
            session.close(self._close_s())
        books.check_closed()
        ending = Ending("closed", self._cluster.now_s, began_s)
        world.endings[self.process.number] = ending
        self._afterwards()
        return ending

    def _close_s(self) -> float:
        if self.plan.stuck:
            return CLOSE_STUCK_S
        return CLOSE_BESIDE_STUCK_S if any(plan.stuck for plan in self._world.scenario.learners) else CLOSE_S

    def _join(self) -> None:
        """As a supervisor would: try again while the store is away or the old lease runs."""
        for attempt in range(6):
            try:
                self.session = Session(
                    self._model,
                    mailbox=self._box,
                    learner_id=self.plan.name,
                    algorithm=self._world.scenario.algorithm,
                    clock=self._cluster.clock,
                    **self._world.scenario.settings,
                )
                return
            except (LearnerIdInUse, MailboxUnavailable) as error:
                self._world.check_error(self, error)
                if attempt == 5:
                    raise
                self._cluster.clock.sleep(5.0)

    # --- training ---------------------------------------------------------------------------------------

    def _work(self) -> Generator[int, None, None]:
        """The samples of each step, in the rhythm of the steps."""
        if not self._world.scenario.queue:
            for _ in range(self._steps):
                yield self._next_samples()
            return
        queue = SharedQueue(
            "shards", self._box, self.plan.name, lease=20.0, poll_interval=2.0, max_attempts=50, clock=self._cluster.clock, rng=self._rng
        )
        queue.fill(range(self._world.items))
        with closing(queue.tasks()) as tasks:
            for task in tasks:
                self._world.taken(task.value)
                for _ in range(3):
                    yield self._next_samples()

    def _next_samples(self) -> int:
        self._cluster.clock.sleep(self.plan.seconds_per_step * self._rng.uniform(0.9, 1.1))
        return self._rng.choice((1, 2, 4))

    def _train(self, books: Books, session: Session, step: int, samples: int) -> None:
        change = self._changes(step)
        with torch.no_grad():
            for parameter, by in zip(self._model.parameters(), change, strict=True):
                parameter.add_(by)
        # Which fragment a parameter is in is the layout's to say; here each has its own, in order.
        books.stepped(samples, [[by] for by in change])
        session.step(samples)
        self._world.liveness.stepped(self.process, session._membership.life, self.plan.seconds_per_step)
        self._world.liveness.concluded(self.process, session._membership.peers)
        books.check()
        for at, seconds in self.plan.waits:
            if at == step:
                self._wait_at(f"step-{at}", seconds)

    def _changes(self, step: int) -> list[Tensor]:
        if step == self.plan.poisoned_at:
            return [self._change[0] * float("nan"), *self._change[1:]]
        return self._change

    # --- the patterns -----------------------------------------------------------------------------------

    def _wait_at(self, name: str, seconds: float) -> bool:
        barrier = Barrier(self._box, self.plan.name, poll_interval=1.0, clock=self._cluster.clock)
        parties = len(self._world.scenario.learners)
        try:
            self._world.passed_barrier(name, parties, barrier.wait(name, parties, timeout=seconds))
            return True
        except RunTimeout:
            self._world.missed_barrier(self, name, parties)
            return False

    def _afterwards(self) -> None:
        if self._world.scenario.report:
            names = [learner.name for learner in self._world.scenario.learners]
            node = SynchronizationNode(
                "report", names, self._box, self.plan.name, lease=20.0, poll_interval=2.0, clock=self._cluster.clock, rng=self._rng
            )
            node.call(self.plan.name, [float(p.detach().sum()) for p in self._model.parameters()])
            try:
                self._world.reports.append(node.wait(lambda data, invocation: sorted(data), timeout=100.0).value)
            except RunTimeout:
                pass
        if self._wait_at("done", 60.0):
            model, closed = Model(len(self._change), 0.0, elements=len(self._change[0])), self._world.closed()
            versions = align(model, mailbox=self._box, clock=self._cluster.clock)
            values = [[parameter.detach()] for parameter in model.parameters()]
            self._world.aligned(str(self.process), versions, values, closed=closed)
