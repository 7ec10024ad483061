"""``python -m gradientmail_torch.testing.explore``: simulated trainings by the thousand, in search of a broken invariant.

Every seed that breaks one is printed with its scenario and can be replayed, event by event, with ``--trace SEED``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gradientmail_torch.testing.training import Scenario, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one seed has come to."""

    seed: int
    requests: int = 0
    broken: str = ""
    """What does not hold, with the scenario; empty where all does."""


def attempt(seed: int) -> Finding:
    """Simulate one training; a broken invariant is found, and not raised."""
    try:
        return Finding(seed=seed, requests=simulate(seed).cluster.requests)
    except Exception as error:
        return Finding(seed=seed, broken="\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))


def explore(seeds: Sequence[int], *, processes: int = 1) -> Iterator[Finding]:
    """Attempt each seed; findings come as they are made."""
    if processes <= 1:
        yield from map(attempt, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes, initializer=_one_thread) as pool:
        yield from pool.imap_unordered(attempt, seeds, chunksize=4)
        pool.close()
        pool.join()


def _one_thread() -> None:
    torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 1 when an invariant was broken."""
    parser = argparse.ArgumentParser(prog="python -m gradientmail_torch.testing.explore", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first one (default %(default)s)")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="at a time (default %(default)s)")
    parser.add_argument("--trace", type=int, metavar="SEED", help="simulate this seed alone, and print all that happens")
    chosen = parser.parse_args(arguments)
    _one_thread()
    if chosen.trace is not None:
        return _trace(chosen.trace)
    began, requests, broken = time.monotonic(), 0, []
    seeds = range(chosen.start, chosen.start + chosen.seeds)
    with _progress(len(seeds)) as advance:
        for finding in explore(seeds, processes=chosen.processes):
            requests += finding.requests
            if finding.broken:
                broken.append(finding.seed)
                print(f"\nseed {finding.seed}\n{finding.broken}\n", flush=True)
            advance()
    print(f"{len(seeds)} seeds, {requests:,} requests, {time.monotonic() - began:.0f} s; broken: {sorted(broken) or 'none'}")
    return 1 if broken else 0


def _trace(seed: int) -> int:
    print(Scenario.draw(seed))
    try:
        world = simulate(seed, on_event=print)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    print(f"all holds after {world.cluster.requests} requests")
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """A bar where rich is installed and somebody looks; nothing otherwise."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
    except ImportError:
        yield lambda: None
        return
    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


if __name__ == "__main__":
    sys.exit(main())
