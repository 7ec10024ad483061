"""This learner among the others: its life, its state, and who else is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gradientmail_torch import keys
from gradientmail_torch.clock import Clock
from gradientmail_torch.mailbox import Mailbox, Usage
from gradientmail_torch.messages import Beat, LearnerState
from gradientmail_torch.presence import is_waiting
from gradientmail_torch.session.lease import Heartbeat, inherit, take_generation
from gradientmail_torch.session.observer import Observer, Peer
from gradientmail_torch.session.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a beat says of a learner's work."""

    steps: int = 0
    samples: int = 0
    seconds_per_step: float = 0.0
    uplink: float = 0.0
    versions: tuple[int, ...] = ()
    stall_seconds: float = 0.0
    staleness_steps: int = 0
    discarded_steps: int = 0
    usage: Usage = field(default_factory=Usage)


class Membership:
    """Taking part begins with the constructor, which may wait for the old lease of a crashed life."""

    def __init__(self, mailbox: Mailbox, learner_id: str, *, settings: Settings, clock: Clock, progress: Callable[[], Progress]) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._settings = settings
        self._progress = progress
        self._began = clock.monotonic()
        self.state: LearnerState = "joining"
        self.life = keys.Life(learner_id, take_generation(mailbox, learner_id, settings=settings, clock=clock))
        self._inheritance = inherit(mailbox, self.life)
        self._heartbeat = Heartbeat(mailbox, self.life, interval=settings.beat_interval, describe=self._beat)
        self._observer = Observer(mailbox, lease=settings.lease, clock=clock)

    def beat(self) -> float:
        """One tick of the heartbeat; raises :class:`LearnerFenced` when a newer life has taken over."""
        pause = self._heartbeat.tick()
        for key in self._inheritance.beats:
            self._mailbox.delete(key)
        self._inheritance = self._inheritance._replace(beats=())
        return pause

    def observe(self) -> float:
        """One tick of watching the others."""
        self._observer.observe()
        return self._settings.beat_interval

    @property
    def peers(self) -> Mapping[str, Peer]:
        """All learners whose life has not ended, this one included, as last observed."""
        return self._observer.peers

    @property
    def sampled(self) -> bool:
        """Whether there are so many learners that a death is noticed too late for a round to wait for all who seem to live."""
        return self._observer.sampled

    def live(self) -> frozenset[str]:
        """The live learners, this one included."""
        return frozenset(learner_id for learner_id, peer in self.peers.items() if peer.live) | {self.life.learner_id}

    def training(self) -> int:
        """Live learners in training, this one included."""
        return max(1, sum(peer.live and peer.beat.state == "training" for peer in self.peers.values()))

    def others(self, *states: LearnerState) -> list[str]:
        """Other live learners in one of ``states``."""
        return sorted(
            learner_id
            for learner_id, peer in self.peers.items()
            if peer.live and peer.beat.state in states and learner_id != self.life.learner_id
        )

    def who_is_there(self) -> str:
        """The other live learners, in words."""
        return f"live beside it: {', '.join(self.others('joining', 'training', 'waiting', 'leaving')) or 'nobody'}"

    def version_hint(self, fragment: int) -> int:
        """The newest version of a fragment that any beat has named."""
        versions = self._observer.versions
        return versions[fragment] if fragment < len(versions) else 0

    def _beat(self, count: int) -> Beat:
        waiting = self.state in ("joining", "training") and is_waiting(repr(self._mailbox), self.life.learner_id)
        progress = self._progress()
        return Beat(
            count=count,
            state="waiting" if waiting else self.state,
            steps=progress.steps,
            samples=progress.samples,
            seconds_per_step=progress.seconds_per_step,
            uplink=progress.uplink,
            versions=progress.versions,
            at=self._clock.wall(),
            interval=self._settings.beat_interval,
            seconds=self._clock.monotonic() - self._began,
            stall_seconds=progress.stall_seconds,
            staleness_steps=progress.staleness_steps,
            discarded_steps=progress.discarded_steps,
            requests=progress.usage.requests,
            bytes_up=progress.usage.bytes_up,
            bytes_down=progress.usage.bytes_down,
            earlier=self._inheritance.figures,
        )
