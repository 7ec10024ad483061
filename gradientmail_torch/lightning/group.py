"""The processes of one node: rank 0 holds the session and leads, the others do to their model what it tells them.

Ranks here are node-local. Nothing of this ever crosses to another node; between nodes there is only the mailbox.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from gradientmail_torch import errors
from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import GradientMailError
from gradientmail_torch.lightning.signals import Preempted

T = TypeVar("T")

TAKE_APART_S = 5.0
ASK_EVERY_S = 2.0
"""How often a waiting rank 0 gives the others a sign of life and hears whether one of them was told to stop."""


class Group:
    """Runs pieces of work on rank 0, which may have the other ranks carry out operations meanwhile."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.rank = int(strategy.global_rank)  # type: ignore[attr-defined]
        self.size = int(getattr(strategy, "world_size", 1))
        self._operations: dict[str, Callable[..., object]] = {}
        self._detached = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether no other rank follows: it is the only one, or the group has broken up."""
        return self.size == 1 or self._detached

    def detach(self) -> None:
        """Stop leading: after an exception the other ranks no longer answer, and a collective would hang."""
        self._detached = True

    def operation(self, name: str, action: Callable[..., object]) -> None:
        """Have ``action(*arguments)`` done by the followers whenever the leader says :meth:`everyone` ``name``."""
        self._operations[name] = action

    def everyone(self, name: str, *arguments: object) -> None:
        """On rank 0, within :meth:`lead`: have the followers begin an operation. The leader does its own part."""
        if not self.alone:
            self._strategy.broadcast(("do", name, arguments), src=0)

    def lead(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and give its result, which must be picklable, to every rank.

        What it raises is raised on every rank: errors of this package in kind, others as :class:`GradientMailError`.
        """
        if self.alone:
            return work()
        return self._lead(work) if self.leads else self._follow()

    def _lead(self, work: Callable[[], T]) -> T:
        try:
            result = work()
        except BaseException as error:
            self._strategy.broadcast(("raise", type(error).__name__, (str(error),)), src=0)
            raise
        self._strategy.broadcast(("return", "", (result,)), src=0)
        return result

    def _follow(self) -> Any:
        while True:
            message: tuple[str, str, tuple[Any, ...]] = ("", "", ())
            verb, name, arguments = self._strategy.broadcast(message, src=0)
            match verb:
                case "do":
                    self._operations[name](*arguments)
                case "return":
                    return arguments[0]
                case _:
                    raise _as_here(name, arguments[0])

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is true on any rank of the node: one small all-reduce."""
        if self.alone:
            return flags
        together = torch.tensor(flags, dtype=torch.int32, device=self._strategy.root_device)
        dist.all_reduce(together, dist.ReduceOp.MAX)
        return tuple(bool(flag) for flag in together.tolist())

    def inquiry(self, flag: Callable[[], bool]) -> Callable[[], bool]:
        """What rank 0 calls while it waits within :meth:`lead`: whether ``flag`` is true on any rank of the node.

        The others are asked every ``ASK_EVERY_S`` seconds, which also keeps the process group from timing out.
        Every rank must have made its inquiry before.
        """
        self.operation("answer", lambda: self.any(flag()))
        asked_at = SYSTEM_CLOCK.monotonic()

        def ask() -> bool:
            nonlocal asked_at
            if self.alone or SYSTEM_CLOCK.monotonic() - asked_at < ASK_EVERY_S:
                return flag()
            asked_at = SYSTEM_CLOCK.monotonic()
            self.everyone("answer")
            return self.any(flag())[0]

        return ask


def end_with_the_process() -> None:
    """Take the process group apart at the end of the process, which Lightning does for NCCL alone.

    A thread of gloo's that is still there when the interpreter ends aborts the process, so that the exit code of a
    node that was told to stop is lost (seen with torch 2.13).
    """
    if dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        atexit.unregister(_take_apart)
        atexit.register(_take_apart)


def _take_apart() -> None:
    """Within ``TAKE_APART_S``: where another rank is stuck in a collective of its own, this would not end."""
    if dist.is_initialized():
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(TAKE_APART_S)


def _as_here(name: str, text: str) -> BaseException:
    """What rank 0 raised, for another rank to raise."""
    if name == Preempted.__name__:
        return Preempted()
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, GradientMailError):
        return kind(f"{text} (on rank 0 of this node)")
    return GradientMailError(f"rank 0 of this node failed: {name}: {text}")
