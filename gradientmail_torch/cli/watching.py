"""Who is there, told by watching beats change. No clock of another machine is looked at."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from gradientmail_torch import keys
from gradientmail_torch.cli.run_view import LifeView, read_beats
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import Beat

UNSAID_INTERVAL_S = 5.0
"""Seconds between two beats of a learner that does not say them; those of the default lease."""
MISSED_BEATS = 2.5
"""A learner that has let so many intervals pass without a beat is called silent."""

Presence = Literal["alive", "silent", "ended", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    presence: Presence
    """``unknown``: not watched for long enough to tell."""
    still_s: float
    """Seconds of own watching since the beat last changed."""


@dataclass(slots=True)
class _Seen:
    count: int
    since: float
    moved: bool = False


class BeatWatch:
    """Remembers when each beat last changed before its own eyes."""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._seen: dict[Hashable, _Seen] = {}

    def see_count(self, who: Hashable, count: int) -> tuple[bool, float]:
        """Whether the count of ``who`` has changed since it was seen first, and for how many seconds it has not."""
        now = self._clock.monotonic()
        seen = self._seen.setdefault(who, _Seen(count, now))
        if seen.count != count:
            seen.count, seen.since, seen.moved = count, now, True
        return seen.moved, now - seen.since

    def see(self, beats: Mapping[keys.Life, Beat | None]) -> dict[keys.Life, Sighting]:
        """Take in what has just been read, and say who is there."""
        return {life: self._see(life, beat) for life, beat in beats.items()}

    def _see(self, life: keys.Life, beat: Beat | None) -> Sighting:
        moved, still_s = self.see_count(life, -1 if beat is None else beat.count)
        presence: Presence = "alive" if moved else "unknown"
        if beat is not None and beat.state == "ended":
            presence = "ended"
        elif still_s > MISSED_BEATS * _interval(beat):
            presence = "silent"
        return Sighting(presence=presence, still_s=still_s)


def sightings(
    mailbox: Mailbox, lives: Iterable[LifeView], watch: BeatWatch, *, longest_s: float = 20.0, clock: Clock = SYSTEM_CLOCK
) -> dict[keys.Life, Sighting]:
    """Watch until it can be told of everyone whether they are there, at most ``longest_s`` seconds."""
    beats: dict[keys.Life, Beat | None] = {keys.Life(life.learner_id, life.generation): life.beat for life in lives}
    deadline = clock.monotonic() + longest_s
    seen = watch.see(beats)
    while open_ones := [life for life, sighting in seen.items() if sighting.presence == "unknown"]:
        now = clock.monotonic()
        if now >= deadline:
            break
        clock.sleep(min(deadline - now, min(_interval(beats[life]) for life in open_ones) / 4))
        found = read_beats(mailbox, open_ones, clock=clock)
        beats.update(found)
        seen.update(watch.see(found))
    return seen


def _interval(beat: Beat | None) -> float:
    return beat.interval if beat is not None and beat.interval > 0 else UNSAID_INTERVAL_S
