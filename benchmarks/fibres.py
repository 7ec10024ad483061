"""The kernel of a simulation on greenlets instead of threads: the same order of events, in a fraction of the time.

For simulations of a thousand nodes, whose handing over between threads would take nearly all of the time. What a
library keeps for each thread (such as whether torch records gradients) is one for all of these.
"""

from __future__ import annotations

from typing import Any

import greenlet

from gradientmail_torch.testing.kernel import Kernel
from gradientmail_torch.testing.process import SimulatedThread


class _Gate:
    """Where a thread waits for the baton: it goes back to the driver, who switches to whoever has it."""

    def acquire(self) -> None:
        greenlet.getcurrent().parent.switch()

    def release(self) -> None: ...


class FibreKernel(Kernel):
    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._fibres: dict[int, greenlet.greenlet] = {}
        self._hub = greenlet.getcurrent()

    def inside(self) -> SimulatedThread | None:
        return None if greenlet.getcurrent() is self._hub else self.current

    def leave(self, thread: SimulatedThread) -> None:
        super().leave(thread)
        self._ending.clear()
        del self._fibres[thread.number]

    def _hand(self, thread: SimulatedThread | None) -> None:
        self.current = thread

    def _await_baton(self) -> None:
        while (thread := self.current) is not None:
            if not thread.started:
                thread.started, thread.gate = True, _Gate()  # type: ignore[assignment]
                self._fibres[thread.number] = greenlet.greenlet(thread._run)
            self._fibres[thread.number].switch()
