"""Loading a run's committed parameters into a model."""

from __future__ import annotations

import logging
import os

from torch import nn

from gradientmail_torch.algorithms.layout import Layout
from gradientmail_torch.algorithms.model_tensors import plain_name
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import RunMismatch
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.session.parameters import LocalParameters, ParameterAccess
from gradientmail_torch.session.run import Run

log = logging.getLogger(__name__)


def align(
    model: nn.Module, *, mailbox: Mailbox | str | os.PathLike[str], access: ParameterAccess | None = None, clock: Clock = SYSTEM_CLOCK
) -> tuple[int, ...]:
    """Load the newest committed value of every fragment into ``model``; returns their versions.

    All who call this get the same parameters, to the last bit, if no learner is still training: call it behind
    a barrier that all of them reach after closing their sessions. Raises :class:`RunMismatch` when the mailbox
    holds no run, or that of another model. Parameters that the run does not have keep their values, with a warning
    if they are trainable; whether those of the run are trainable in ``model`` at the moment does not matter.
    """
    box = open_mailbox(mailbox, clock=clock)
    run = Run.open(box)
    if run is None:
        raise RunMismatch(f"{box!r} holds no run: a Session founds one. Is the URL, with its prefix, that of the run?")
    access = access or LocalParameters(model, run.layout)
    _warn_of_more(model, run.layout)
    versions = []
    for index in range(len(run.layout)):
        commit, values = run.newest(index)
        access.write(index, values)
        versions.append(commit.version if commit is not None else 0)
    return tuple(versions)


def _warn_of_more(model: nn.Module, layout: Layout) -> None:
    more = {plain_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    more -= {spec.name for specs in layout for spec in specs}
    if more:
        log.warning("%d trainable parameters of this model are not in the run and keep their values: %s, …", len(more), min(more))
