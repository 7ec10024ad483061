"""Loading the run's parameters on every process of a node."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from gradientmail_torch.algorithms.layout import Layout
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.lightning.parameters import access_for
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.session import align
from gradientmail_torch.session.run import Run


def align_together(model: nn.Module, group: Group, mailbox: Callable[[], Mailbox]) -> tuple[int, ...]:
    """:func:`gradientmail_torch.session.align`, called on every rank of a node."""
    layout = None if group.alone else layout_of_run(group, mailbox)
    access = access_for(model, group, layout) if layout is not None else None
    return group.lead(lambda: align(model, mailbox=mailbox(), access=access))


def layout_of_run(group: Group, mailbox: Callable[[], Mailbox]) -> Layout | None:
    """What the run in the mailbox consists of, on every rank of a node; None where there is no run."""

    def read() -> Layout | None:
        run = Run.open(mailbox())
        return run.layout if run is not None else None

    return group.lead(read)
