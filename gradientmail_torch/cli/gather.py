"""Several requests at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from gradientmail_torch.clock import SYSTEM_CLOCK, Clock

T = TypeVar("T")


def gather(work: Iterable[Callable[[], T]], *, width: int = 16, clock: Clock = SYSTEM_CLOCK) -> list[T]:
    """The results of all functions, in their order, at most ``width`` running at once; raises the first error."""
    calls = [*work]
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting = iter(range(len(calls)))
    lock = threading.Lock()

    def run() -> None:
        while not errors:
            with lock:
                place = next(waiting, None)
            if place is None:
                return
            try:
                results[place] = calls[place]()
            except BaseException as error:
                errors.append(error)

    tasks = [clock.spawn(run, name=f"gradientmail-gather-{n}") for n in range(min(width, len(calls)))]
    for task in tasks:
        task.join()
    if errors:
        raise errors[0]
    return [results[place] for place in range(len(calls))]
