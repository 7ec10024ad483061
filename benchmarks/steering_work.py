"""What the tasks of the steering benchmark do. A module of its own, for workers to import."""

from __future__ import annotations

import time


def nothing() -> None:
    pass


def fifty_milliseconds() -> None:
    time.sleep(0.05)
