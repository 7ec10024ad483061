"""Forks learners for test_processes.py, so that torch is imported once: a line of JSON in, a process out.

Each learner trains in a process of its own, may send itself a signal at an exact operation on the mailbox, and
writes what became of it to a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import gradientmail_torch.mailbox.s3  # noqa: F401  (loaded before the first fork)
from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.session import Session, align
from gradientmail_torch.testing.faults import Interposed

T = TypeVar("T")
PACE_S = 30.0


class Fated(Interposed):
    """A mailbox that paces its learner's steps by requests, and sends its process a signal at one of them."""

    def __init__(self, inner: Mailbox, fate: dict[str, Any] | None) -> None:
        super().__init__(inner)
        self._fate = fate
        self._met = 0
        self._requests = 0
        self._changed = threading.Condition()

    def _request(self, operation: str, key: str, bytes_up: int, carry_out: Callable[[], T]) -> T:
        struck = self._strikes(f"{operation} {key}")
        if struck == "before":
            self._strike()
        result = carry_out()
        if struck == "after":
            self._strike()
        with self._changed:
            self._requests += 1
            self._changed.notify_all()
        return result

    def _strikes(self, request: str) -> str:
        if self._fate is None or not re.fullmatch(self._fate["at"], request):
            return ""
        with self._changed:
            self._met += 1
            return str(self._fate["when"]) if self._met == self._fate["number"] else ""

    def _strike(self) -> None:
        assert self._fate is not None
        # To this thread, so that it does not go on until another one has taken the signal.
        signal.pthread_kill(threading.get_ident(), getattr(signal, self._fate["signal"]))

    @property
    def fate_is_met(self) -> bool:
        """Who is to die at a commit trains until it has one to make, which may be when the others are done."""
        return self._fate is None or self._met >= self._fate["number"]

    def wait_for(self, requests: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._requests >= requests, PACE_S), "the background stands still"


def vector_hash(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(torch.randn(4, 3)) - 1.0).square().mean().backward()
    optimizer.step()


def live(config: dict[str, Any]) -> dict[str, Any]:
    """A life of a learner, from its start to the alignment after the others have closed as well."""
    os.environ.update(config["env"])
    torch.manual_seed(os.getpid())
    model = nn.Linear(3, 2)
    box = Fated(open_mailbox(config["url"]), config["fate"])
    algorithm = DecoupledDiLoCo(**{"sync_every": 3, "fragments": 2, "grace": 0.1} | config["algorithm"])
    session = Session(model, mailbox=box, learner_id=config["learner_id"], algorithm=algorithm, lease=2.0, poll_interval=0.05, keep=None)
    barrier = Barrier(mailbox=box, learner_id=config["learner_id"], poll_interval=0.05)
    barrier.wait("start", parties=config["parties"], timeout=PACE_S)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with session:
        for number in count():
            if number >= config["steps"] and box.fate_is_met:
                break
            train(model, optimizer)
            session.step(samples=4)
            box.wait_for(10 + 4 * number)
    barrier.wait("done", parties=config["parties"], timeout=PACE_S)
    versions = align(model, mailbox=box)
    stats = session.stats()
    return {
        "hash": vector_hash(model),
        "versions": versions,
        "done": stats.steps * len(versions),
        "merged": stats.tally.merged_work.steps,
        "discarded": stats.tally.discarded_work.steps,
        "generation": keys.parse_life(next(reversed(list(box.list(keys.learner_lives(config["learner_id"])))))).generation,
    }


def give_birth(config: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        result: dict[str, Any] = live(config)
    except BaseException as error:
        result = {"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
    scratch = Path(config["result"] + ".part")
    scratch.write_text(json.dumps(result))
    scratch.rename(config["result"])
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are buried at once
    first = nn.Linear(3, 2)
    train(first, torch.optim.SGD(first.parameters(), lr=0.05))  # loads what torch loads at the first step
    print("ready", flush=True)
    for line in sys.stdin:
        print(give_birth(json.loads(line)), flush=True)
