"""What all node programs share: their options, the loop over steps, and the file of events that they leave.

An event is a line of JSON with ``at``, seconds of this machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # before torch is imported: the time from a process's start to its first step counts

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from collections.abc import Callable, Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from benchmarks import work  # noqa: E402


class Options(argparse.Namespace):
    node: int
    nodes: int
    steps: int
    sync_every: int
    seed: int
    events: Path
    until: float
    """On the monotonic clock; the loop ends then, whatever ``steps`` says."""
    settings: dict[str, Any]
    """Of the method, from the table of methods."""
    address: str
    """Of what the method meets at: the mailbox's URL, or host and port of a coordinator."""
    latecomer: bool
    """The others are training already."""
    present: int
    """Nodes that are there from the beginning."""

    @property
    def rows(self) -> int:
        return work.GLOBAL_ROWS // self.nodes


def options() -> Options:
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--present", type=int, default=1, help="nodes that are there from the beginning")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--address", default="")
    parser.add_argument("--latecomer", action="store_true")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return parser.parse_args(namespace=Options())


class Recorder:
    """Appends events to a file, a line each, flushed at once: the process may be killed at any moment."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self("start", at=BEGAN, pid=os.getpid())

    def __call__(self, event: str, *, at: float | None = None, **figures: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.monotonic() if at is None else at, **figures}) + "\n")


def nothing() -> Mapping[str, Any]:
    return {}


def train(
    given: Options,
    record: Recorder,
    forward: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    scheduled: torch.optim.Optimizer | None = None,
    after_step: Callable[[], Mapping[str, Any]] = nothing,
) -> None:
    """Step until the steps or the time are over.

    Args:
        forward: gives the loss; a wrapper of the model where the method has one.
        scheduled: whose learning rate follows the schedule, if not ``optimizer``.
        after_step: the method's own call after each step; its time counts as the method's, and what it gives is recorded.
    """
    for step in range(given.steps):
        began = time.monotonic()
        windows = work.batch(step, seed=given.seed, node=given.node, nodes=given.nodes)
        work.set_rate(scheduled or optimizer, step, given.steps)
        optimizer.zero_grad()
        loss = forward(windows)
        loss.backward()
        computed = time.monotonic()
        optimizer.step()
        stepped = time.monotonic()
        seen = after_step()
        ended = time.monotonic()
        record(
            "step",
            at=ended,
            step=step,
            tokens=given.rows * work.CONTEXT,
            loss=round(loss.item(), 4),
            compute_s=round(computed - began, 5),
            optimizer_s=round(stepped - computed, 5),
            method_s=round(ended - stepped, 5),
            cpu_s=round(time.process_time(), 3),
            **seen,
        )
        if ended >= given.until:
            return


def validate(record: Recorder, model: nn.Module) -> None:
    record("validated", loss=round(work.validation_loss(model), 5))
