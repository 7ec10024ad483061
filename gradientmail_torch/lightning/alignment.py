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

    def layout_of_run() -> Layout | None:
        run = Run.open(mailbox())
        return run.layout if run is not None else None

    access = None
    if not group.alone and (layout := group.lead(layout_of_run)) is not None:
        access = access_for(model, group, layout)
    return group.lead(lambda: align(model, mailbox=mailbox(), access=access))


def run_exists(group: Group, mailbox: Callable[[], Mailbox]) -> bool:
    """Whether the mailbox holds a run, the same answer on every rank of a node."""
    return group.lead(lambda: Run.open(mailbox()) is not None)
