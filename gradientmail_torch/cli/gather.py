"""Several requests at the same time, and listings that pass over what is not asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar

from gradientmail_torch import keys
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import R, read

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


def read_all(mailbox: Mailbox, kind: type[R], wanted: Iterable[str], *, clock: Clock = SYSTEM_CLOCK) -> list[R | None]:
    """The records at these keys, None where there is none or it cannot be read: one bad object must not hide the others."""
    return gather([partial(_tolerant, mailbox, kind, key) for key in wanted], clock=clock)


def _tolerant(mailbox: Mailbox, kind: type[R], key: str) -> R | None:
    try:
        return read(mailbox, kind, key)
    except CorruptObject:
        return None


def names_below(mailbox: Mailbox, prefix: str) -> Iterator[str]:
    """The names of what lies below ``prefix``: one listing each, which jumps over what it consists of."""
    after, seen = "", set[str]()
    while (key := next(mailbox.list(prefix, after=after), None)) is not None:
        name = keys.segment_below(prefix, key)
        if name in seen:
            return
        seen.add(name)
        yield name
        after = keys.behind_segment(prefix, name)
