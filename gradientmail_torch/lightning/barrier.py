"""A barrier between nodes that all processes of a node wait at together."""

from __future__ import annotations

from collections.abc import Callable

from gradientmail_torch.errors import RunTimeout
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.signals import Preempted
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.barrier import Barrier

SLICE_S = 60.0
"""Rank 0 gives the node's other ranks a sign of life this often, so that their process group does not time out."""


class NodeBarrier:
    """Rank 0 waits at the mailbox, the other ranks of the node wait for rank 0."""

    def __init__(self, group: Group, mailbox: Callable[[], Mailbox], learner_id: str, *, poll_interval: float) -> None:
        self._group = group
        self._mailbox = mailbox
        self._learner_id = learner_id
        self._poll_interval = poll_interval

    def wait(self, name: str, parties: int, timeout: float | None, *, interrupted: Callable[[], bool] = lambda: False) -> list[str]:
        """See :meth:`gradientmail_torch.patterns.barrier.Barrier.wait`; called on every rank of the node.

        Raises :class:`TimeoutError` on all ranks, and :class:`Preempted` once ``interrupted`` is true on any.
        """
        left = timeout
        while True:
            piece = SLICE_S if left is None else min(left, SLICE_S)
            outcome = self._group.lead(lambda piece=piece: self._wait_a_while(name, parties, piece))  # type: ignore[misc]
            if isinstance(outcome, list):
                return outcome
            if left is not None:
                left -= piece
                if left <= 0:
                    raise RunTimeout(outcome)
            if self._group.any(interrupted()):
                raise Preempted

    def _wait_a_while(self, name: str, parties: int, seconds: float) -> list[str] | str:
        try:
            return Barrier(self._mailbox(), self._learner_id, poll_interval=self._poll_interval).wait(name, parties, timeout=seconds)
        except RunTimeout as error:
            return str(error)
