"""Which learners of this process are waiting at a barrier.

A Barrier does not know the Session beside it, and need not: it says here that its learner is waiting, and the
session's heartbeat passes it on, so that rounds do not wait for a learner that publishes nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

_waiting: Counter[tuple[str, str]] = Counter()
_lock = threading.Lock()


@contextmanager
def waiting(run: str, learner_id: str) -> Iterator[None]:
    """Mark ``learner_id`` as waiting in ``run`` (a mailbox's repr) for the time of a ``with`` block."""
    with _lock:
        _waiting[run, learner_id] += 1
    try:
        yield
    finally:
        with _lock:
            _waiting[run, learner_id] -= 1
            if not _waiting[run, learner_id]:
                del _waiting[run, learner_id]


def is_waiting(run: str, learner_id: str) -> bool:
    with _lock:
        return _waiting[run, learner_id] > 0
