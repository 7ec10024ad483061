"""SIGTERM as a flag that the ranks of a node look at together.

Lightning's own handler broadcasts from inside the handler, which mis-pairs with the collectives under way: a
SIGTERM to one rank of two hangs both (seen with lightning 2.6.6, gloo).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException


class Preempted(SIGTERMException):
    """This node was told to stop. Ends the process with 143 (128 + SIGTERM), so that launchers see it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class TerminationFlag:
    """Set by SIGTERM between :meth:`install` and :meth:`remove`; the handler does nothing else."""

    def __init__(self) -> None:
        self.raised = False
        self._previous: Any = None
        self._installed = False

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def remove(self) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous if self._previous is not None else signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
