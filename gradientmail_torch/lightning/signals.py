"""SIGTERM as a note that the ranks of a node act on together.

Lightning's own handler broadcasts from inside the handler, which mis-pairs with the collectives under way: a
SIGTERM to one rank of two hangs both (seen with lightning 2.6.6, gloo).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from gradientmail_torch.clock import SystemClock


class Preempted(SIGTERMException):
    """This node was told to stop. Ends the process with 143 (128 + SIGTERM), so that launchers see it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Termination:
    """What has become of a SIGTERM to this process, between :meth:`install` and :meth:`remove`."""

    def __init__(self) -> None:
        self._noted = False
        self._heeded = False
        self._previous: Any = None
        self._installed = False

    @property
    def due(self) -> bool:
        """Whether a SIGTERM has come that nobody has acted on."""
        return self._noted and not self._heeded

    def heed(self) -> None:
        """Say that it is being acted on: this process's part in the run ends."""
        self._heeded = True

    def install(self) -> None:
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def remove(self) -> None:
        """Put the former handler back."""
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
        self._noted = self._heeded = self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


class InterruptibleClock(SystemClock):
    """Ends a wait with :class:`Preempted` when ``interrupted`` becomes true: once, on the thread that made the clock."""

    def __init__(self, interrupted: Callable[[], bool]) -> None:
        self._interrupted = interrupted
        self._thread = threading.get_ident()
        self._raised = False

    def sleep(self, seconds: float) -> None:
        self._check()
        super().sleep(seconds)

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        self._check()
        return super().wait(event, timeout)

    def _check(self) -> None:
        if not self._raised and threading.get_ident() == self._thread and self._interrupted():
            self._raised = True  # leaving, which follows, has waits of its own
            raise Preempted
