"""Who beat when, who read it, and so whom a learner may take for dead, wait for, or succeed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from gradientmail_torch import keys
from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, decode
from gradientmail_torch.session.observer import Peer
from gradientmail_torch.testing.network import Event
from gradientmail_torch.testing.process import Process
from gradientmail_torch.testing.training.ledger import is_creation
from gradientmail_torch.testing.training.violations import Invariant, Violation

_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Read:
    """A process has asked for a beat."""

    own_s: float
    """By its own monotonic clock."""
    at_s: float
    count: int
    state: str


@dataclass(slots=True)
class Seen:
    """What one process has seen of one life."""

    reads: list[Read] = field(default_factory=list)
    training_since_s: float | None = None
    """Since when every read has said so."""
    taken_for_dead: set[int] = field(default_factory=set)
    """Counts of beats after which it was right to do so."""

    def had_news(self, since_s: float, until_s: float, within_s: float) -> bool:
        """Whether it was never without a new beat for ``within_s`` seconds, from so long before ``since_s`` on."""
        news = [after.at_s for before, after in pairwise(self.reads) if before.count != after.count and after.at_s > since_s - within_s]
        return bool(news) and news[0] <= since_s and all(b - a < within_s for a, b in pairwise([*news, until_s]))


class Liveness:
    """Is told of each request that takes effect, of what befalls processes, and of what learners conclude."""

    def __init__(
        self, store: MemoryMailbox, algorithm: Algorithm, *, lease_s: float, slowest_request_s: float, now_s: Callable[[], float]
    ) -> None:
        self._store = store
        self._algorithm = algorithm
        self._lease_s = lease_s
        self._slowest_request_s = slowest_request_s
        self._now_s = now_s
        self.processes: Mapping[str, Process] = {}
        """By what the log calls them."""
        self.lives: dict[str, list[Process]] = defaultdict(list)
        """The process of each generation of a learner ID, from the first on."""
        self._born_at: dict[keys.Life, float] = {}
        self._seen: dict[str, dict[keys.Life, Seen]] = defaultdict(lambda: defaultdict(Seen))
        self._active: dict[str, list[float]] = defaultdict(list)
        self._beats: dict[keys.Life, Beat] = {}
        self._beat_at: dict[keys.Life, float] = {}
        self._silent_at: dict[str, float] = {}
        """When a learner was last seen silent for long enough to be taken for dead."""
        self._troubled_until: dict[str, float] = defaultdict(float)

    # --- requests ---------------------------------------------------------------------------------------

    def observed(self, event: Event) -> None:
        process = self.processes[event.process]
        active = self._active[event.process]
        # What was sent before a suspension may take effect within it: where the clock stops as well, it shows no earlier time.
        own_s = max(self._now_s() + process.monotonic_origin_s, active[-1] if active else float("-inf"))
        active.append(own_s)
        kind = event.key.partition("/")[0]
        if kind == "beats" and event.what == "get":
            self._read(event, own_s)
        elif kind == "beats" and event.what == "put":
            life, body = keys.parse_life(event.key), self._store.get(event.key)
            assert body is not None
            self._note_silence(life)
            self._beats[life] = decode(Beat, body, key=event.key)
            self._beat_at[life] = event.at_s
        elif kind == "learners" and is_creation(event):
            self._born(event, keys.parse_life(event.key), process)

    def _note_silence(self, life: keys.Life) -> None:
        if self._now_s() - self._beat_at.get(life, self._now_s()) > self._lease_s * 2 / 3:
            self._silent_at[life.learner_id] = self._now_s()

    def silent_since(self, learner_id: str, since_s: float) -> bool:
        """Whether others may have taken a learner for dead since then, or have not noticed yet that it is back.

        Who is dead is looked at every fifth time.
        """
        since_s -= self._lease_s + 2 * self._slowest_request_s
        life = keys.Life(learner_id, len(self.lives[learner_id]))
        self._note_silence(life)
        return self._silent_at.get(learner_id, float("-inf")) >= since_s or self._born_at.get(life, float("inf")) >= since_s

    def _read(self, event: Event, own_s: float) -> None:
        life = keys.parse_life(event.key)
        beat = self._beats.get(life) if event.outcome != "absent" else None
        seen = self._seen[event.process][life]
        state = beat.state if beat else ""
        seen.reads = [*seen.reads[-200:], Read(own_s, event.at_s, beat.count if beat else _ABSENT, state)]
        if state != "training":
            seen.training_since_s = None
        elif seen.training_since_s is None:
            seen.training_since_s = event.at_s

    def _born(self, event: Event, life: keys.Life, process: Process) -> None:
        lives = self.lives[life.learner_id]
        if life.generation != len(lives) + 1:
            raise Violation(Invariant.ONE_LIFE, f"{event.key} follows generation {len(lives)}")
        if lives and lives[-1].alive and not self._was_silent(event.process, keys.Life(life.learner_id, len(lives))):
            raise Violation(Invariant.ONE_LIFE, f"{process} takes over from {lives[-1]}, whose silence it has not watched for a lease")
        lives.append(process)
        self._born_at[life] = event.at_s

    def _was_silent(self, observer: str, life: keys.Life) -> bool:
        reads = self._seen[observer][life].reads
        if any(read.state == "ended" for read in reads):
            return True
        return any(self._silence(observer, reads, read.count) for read in reads)

    def _silence(self, observer: str, reads: list[Read], count: int) -> bool:
        """Whether an observer has read the same beat over a lease in which it was itself awake and online.

        Of the time between two of its requests at most a sixth of a lease counts. Requests are taken here at the
        moment of their effect, and there at that of their answer: so two thirds of a lease are asked for.
        """
        same = [read.own_s for read in reads if read.count == count]
        if not same:
            return False
        awake = [same[0], *(at_s for at_s in self._active[observer] if same[0] < at_s <= same[-1])]
        watched_s = sum(min(after - before, self._lease_s / 6) for before, after in pairwise(awake))
        return watched_s >= self._lease_s * 2 / 3 - 0.001

    # --- what befalls processes ------------------------------------------------------------------------

    def troubled(self, process: Process, seconds: float) -> None:
        """For so long ``process`` cannot work, or cannot reach the store."""
        self._troubled_until[str(process)] = max(self._troubled_until[str(process)], self._now_s() + seconds)

    def has_rival(self, process: Process) -> bool:
        """Whether another process has had this name lately."""
        since_s = self._now_s() - 2 * self._lease_s - 60
        return any(
            other is not process and other.name == process.name and (other.alive or other.died_at_s > since_s)
            for other in self.processes.values()
        )

    # --- what learners conclude ------------------------------------------------------------------------

    def stepped(self, process: Process, life: keys.Life, seconds_per_step: float) -> None:
        """A life has trained a step: it must not when it could have seen a newer one."""
        successor = keys.Life(life.learner_id, life.generation + 1)
        if len(self.lives[life.learner_id]) < life.generation or self.lives[life.learner_id][life.generation - 1] is not process:
            raise Violation(Invariant.ONE_LIFE, f"{process} trains as {life}, which is another's")
        if successor not in self._born_at:
            return
        free_since_s = max(self._born_at[successor], self._troubled_until[str(process)])
        # The heartbeat that is on its way, a whole one with two requests that are retried, and the step.
        limit_s = 3 * (20.0 + 2 * self._slowest_request_s) + self._lease_s / 6 + 1.0 + 2 * seconds_per_step
        if self._now_s() - free_since_s > limit_s:
            raise Violation(Invariant.ONE_LIFE, f"{process} still trains {self._now_s() - free_since_s:.0f} s after {successor} took over")

    def concluded(self, process: Process, peers: Mapping[str, Peer]) -> None:
        """What a learner holds of the others at this moment."""
        for peer in peers.values():
            life = keys.Life(peer.learner_id, peer.generation)
            seen = self._seen[str(process)][life]
            if peer.live or peer.beat.count in seen.taken_for_dead:
                continue
            if not self._silence(str(process), seen.reads, peer.beat.count):
                raise Violation(
                    Invariant.SILENCE,
                    f"{process} takes {life} for dead at beat {peer.beat.count}, of which it has seen "
                    f"{[f'{read.count} at {read.at_s:.1f}' for read in seen.reads[-8:]]}",
                )
            seen.taken_for_dead.add(peer.beat.count)

    def committed(self, event: Event, recorded_at: Mapping[str, float]) -> None:
        """A round has been committed: it must have waited its grace for those whom its syncer knew to be training."""
        if not isinstance(self._algorithm, DecoupledDiLoCo) or not self._algorithm.grace:
            return
        if len(recorded_at) < self._algorithm.quorum_size:
            return  # all are leaving
        quorum_at_s = sorted(recorded_at.values())[self._algorithm.quorum_size - 1]
        waited_s = event.at_s - quorum_at_s
        if waited_s >= self._algorithm.grace:
            return
        for life, seen in self._seen[event.process].items():
            if life.learner_id in recorded_at or life.generation != len(self.lives[life.learner_id]) or seen.training_since_s is None:
                continue
            known = seen.training_since_s < quorum_at_s - self._lease_s / 3
            if known and seen.had_news(quorum_at_s, event.at_s, self._lease_s / 3):
                raise Violation(
                    Invariant.GRACE,
                    f"{event.key} was created {waited_s:.1f} s after its quorum, without {life.learner_id}, who is in training; "
                    f"the grace is {self._algorithm.grace:g} s",
                )
