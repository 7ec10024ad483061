"""A barrier between nodes that all processes of a node wait at together."""

from __future__ import annotations

from collections.abc import Callable

from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.signals import InterruptibleClock
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.barrier import Barrier


def wait_together(
    group: Group,
    name: str,
    parties: int,
    timeout: float | None,
    *,
    mailbox: Callable[[], Mailbox],
    learner_id: str,
    poll_interval: float,
    interrupted: Callable[[], bool],
) -> list[str]:
    """Rank 0 waits at the mailbox, the other ranks of the node wait for rank 0; it ends alike on all of them.

    See :meth:`gradientmail_torch.patterns.barrier.Barrier.wait`. Once ``interrupted`` is true on any rank,
    :class:`~gradientmail_torch.lightning.signals.Preempted` is raised on all.
    """
    inquire = group.inquiry(interrupted)

    def wait() -> list[str]:
        barrier = Barrier(mailbox(), learner_id, poll_interval=poll_interval, clock=InterruptibleClock(inquire))
        return barrier.wait(name, parties, timeout)

    return group.lead(wait)
