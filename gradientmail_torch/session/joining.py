"""How far a learner that joins has come, for a progress bar or the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from gradientmail_torch.algorithms.layout import Layout
from gradientmail_torch.clock import Clock

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """Sent after each fragment. The bytes are those of the model in fp32, whatever travels of them."""

    phase: Literal["publishing", "loading"]
    """The founder publishes its initial parameters first; everyone loads the run's."""
    bytes_done: int
    bytes_total: int


OnJoin = Callable[[Joining], None]


class JoinProgress:
    """Tells ``listener`` of each fragment."""

    def __init__(self, layout: Layout, listener: OnJoin) -> None:
        self._sizes = [4 * sum(spec.numel for spec in fragment) for fragment in layout]
        self._listener = listener

    def done(self, phase: Literal["publishing", "loading"], fragments: int) -> None:
        """The first ``fragments`` of them are done."""
        self._listener(Joining(phase=phase, bytes_done=sum(self._sizes[:fragments]), bytes_total=sum(self._sizes)))

    def founding(self, fragment: int) -> None:
        """Called when a founder is asked for a fragment: those before it have been published."""
        self.done("publishing", fragment)

    def loading(self, fragments: Iterable[int]) -> Iterable[int]:
        """``fragments``, one after the other."""
        for place, fragment in enumerate(fragments):
            self.done("loading", place)
            yield fragment
            self.done("loading", place + 1)


def logged(learner_id: str, clock: Clock) -> OnJoin:
    """Writes a line to the log every five seconds, so that short ones write none."""
    said_at = clock.monotonic()

    def say(joining: Joining) -> None:
        nonlocal said_at
        if clock.monotonic() - said_at >= LOG_EVERY_S:
            said_at = clock.monotonic()
            done, total = joining.bytes_done / 1e6, joining.bytes_total / 1e6
            log.info("%s joins: %s parameters, %.0f of %.0f MB", learner_id, joining.phase, done, total)

    return say
