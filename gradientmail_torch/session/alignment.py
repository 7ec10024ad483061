"""Loading a run's committed parameters into a model."""

from __future__ import annotations

import os

from torch import nn

from gradientmail_torch.algorithms.layout import check_same, describe, split
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import RunMismatch
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.session.parameters import LocalParameters, ParameterAccess
from gradientmail_torch.session.run import Run


def align(
    model: nn.Module, *, mailbox: Mailbox | str | os.PathLike[str], access: ParameterAccess | None = None, clock: Clock = SYSTEM_CLOCK
) -> tuple[int, ...]:
    """Load the newest committed value of every fragment into ``model``; returns their versions.

    All who call this get the same parameters, to the last bit, if no learner is still training: call it behind
    a barrier that all of them reach after closing their sessions. Raises :class:`RunMismatch` when the mailbox
    holds no run, or that of another model.
    """
    box = open_mailbox(mailbox, clock=clock)
    run = Run.open(box)
    if run is None:
        raise RunMismatch(f"{box!r} holds no run: a Session founds one. Is the URL, with its prefix, that of the run?")
    buffers = any(spec.kind == "buffer" for specs in run.layout for spec in specs)
    check_same(split(describe(model, buffers=buffers), len(run.layout)), run.layout)
    access = access or LocalParameters(model, run.layout, buffers=buffers)
    versions = []
    for index in range(len(run.layout)):
        commit, values = run.newest(index)
        access.write(index, values)
        versions.append(commit.version if commit is not None else 0)
    return tuple(versions)
