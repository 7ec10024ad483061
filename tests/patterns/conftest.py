"""Parties on clocks of their own, for tests in one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from gradientmail_torch.clock import Task
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import CrashAfter, CrashBefore


@pytest.fixture
def box(mailbox_url: str) -> Mailbox:
    """An empty mailbox of each backend."""
    return open_mailbox(mailbox_url)


class _Ended:
    def join(self, timeout: float | None = None) -> bool:
        return True


class QuietClock(ManualClock):
    """A manual clock whose background threads never get to run, as on a machine that hangs: no heart beats on it."""

    def spawn(self, target: Callable[[], None], *, name: str) -> Task:
        return _Ended()


@pytest.fixture
def quiet_clock() -> type[QuietClock]:
    return QuietClock


def dies_at(mailbox: Mailbox, number: int, *, after: bool) -> Mailbox:
    """A process's way to ``mailbox`` that is killed before or after its request ``number``, and silent from then on."""
    before_count, after_count = count(1), count(1)
    limit = number + 1 if after else number
    inner = CrashAfter(mailbox, lambda operation, key: next(after_count) == number) if after else mailbox
    return CrashBefore(inner, lambda operation, key: next(before_count) >= limit)


@pytest.fixture
def killed() -> Callable[..., Mailbox]:
    return dies_at


@pytest.fixture
def stride(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Steps through the requests of a workload: ``thinned`` over S3, where trying each takes long, one by one elsewhere."""
    return lambda thinned: thinned if "s3_server" in request.fixturenames else 1


@pytest.fixture
def deaths(stride: Callable[[int], int]) -> Callable[..., Iterator[tuple[int, bool]]]:
    """Every place to die at, first to last: before and after each request. The caller stops when one is not reached."""

    def places(thinned: int = 1) -> Iterator[tuple[int, bool]]:
        return ((number, after) for number in count(1, stride(thinned)) for after in (False, True))

    return places


def run_in_threads(count: int, run: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.fixture
def in_threads() -> Callable[[int, Callable[[int], None]], None]:
    """Calls ``run(0)`` to ``run(count - 1)`` at the same time and raises what one of them raised."""
    return run_in_threads
