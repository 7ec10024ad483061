"""How a node takes part in a run: the settings that the strategy and the callback have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gradientmail_torch import config
from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.keys import check_learner_id
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.session import Settings

MailboxLike = str | Path | Mailbox


@dataclass(kw_only=True)
class Participation:
    """Plain values; nothing is opened before :meth:`open`."""

    mailbox: MailboxLike | None = None
    """None: from the environment."""
    learner_id: str | None = None
    """None: from the environment, or made up."""
    algorithm: Algorithm = field(default_factory=DecoupledDiLoCo)
    start_parties: int | None = None
    """Learners that must have joined before the first step; None does not wait."""
    done_parties: int | None = None
    """Learners that must have left before the run's parameters are loaded at the end; None does not wait."""
    start_timeout: float | None = None
    done_timeout: float | None = 600.0
    """Seconds; when it runs out, those who have arrived go on with a warning."""
    align: bool = True
    """Load the run's parameters into the model at the end of fit."""
    reseed: bool = True
    """Give each learner random numbers of its own, so that shuffling and dropout differ."""
    exchange_every: int = 1
    """Optimizer steps between two exchanges with the session; above 1 spares the ranks of a node a broadcast."""
    close_timeout: float = 600.0
    leave_timeout: float = 10.0
    """Seconds to publish what can be published after an exception, Ctrl-C or SIGTERM."""
    batch_size: Callable[[Any], int] | None = None
    """Samples in a batch, where that cannot be told from its tensors."""
    lease: float = 30.0
    poll_interval: float | None = None
    outage_timeout: float = 600.0
    step_timeout: float = 600.0
    keep: int | None = 4
    keep_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("start_parties", "done_parties"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be None or a whole number of at least 1, not {value!r}")
        for name in ("start_timeout", "done_timeout", "close_timeout", "leave_timeout"):
            seconds, endless = getattr(self, name), name in ("start_timeout", "done_timeout")
            if not (endless and seconds is None) and not (isinstance(seconds, int | float) and seconds >= 0):
                raise ConfigError(f"{name} must be {'None or ' if endless else ''}at least 0 seconds, not {seconds!r}")
        _ = self.settings  # refuses bad times now
        if self.exchange_every < 1:
            raise ConfigError(f"exchange_every must be at least 1, not {self.exchange_every!r}")
        if self.learner_id is not None:
            check_learner_id(self.learner_id)

    @property
    def settings(self) -> Settings:
        return Settings(**{each.name: getattr(self, each.name) for each in fields(Settings)})

    def open(self) -> Mailbox:
        """The mailbox, probed; raises an error that names what is wrong with it."""
        self.mailbox = open_mailbox(self.mailbox if self.mailbox is not None else config.mailbox_url())
        return self.mailbox

    def probe(self) -> None:
        """Open the mailbox for the first time, to hear what is wrong with it."""
        self.open()

    def identify(self) -> str:
        """This node's learner ID; the same one on every call."""
        if self.learner_id is None:
            self.learner_id = check_learner_id(config.learner_id())
        return self.learner_id
