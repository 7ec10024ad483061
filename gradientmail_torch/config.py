"""What the environment says of a run and of the launcher.

======================== ==============================================================================
GRADIENTMAIL_MAILBOX     URL of the run's mailbox, where none is given
GRADIENTMAIL_LEARNER_ID  this node's name in the run, where none is given
GRADIENTMAIL_RUN_KEY     secret of the run: every object is signed with it, and what is not is refused
======================== ==============================================================================

Credentials are read by boto3 from its usual places.
"""

from __future__ import annotations

import os
import re
import socket
from uuid import uuid4

from gradientmail_torch.errors import ConfigError

_MADE_UP = uuid4().hex[:6]


def mailbox_url() -> str:
    """The run's mailbox from the environment; raises :class:`ConfigError` when it is not set."""
    url = os.environ.get("GRADIENTMAIL_MAILBOX", "")
    if not url:
        raise ConfigError("no mailbox is given: pass mailbox=… (for example 's3://bucket/run-1') or set GRADIENTMAIL_MAILBOX")
    return url


def learner_id() -> str:
    """This node's name from the environment, or one made of the host's name and a random part: the same on every call."""
    given = os.environ.get("GRADIENTMAIL_LEARNER_ID", "")
    if given:
        return given
    host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname()).strip("-")[:40] or "node"
    return f"{host}-{_MADE_UP}"


def run_key() -> str | None:
    """The secret with which the run's objects are signed; None in a run that is not signed."""
    return os.environ.get("GRADIENTMAIL_RUN_KEY") or None


def launched_processes() -> int:
    """Processes that the launcher started for this job (``WORLD_SIZE`` of torchrun), 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_nodes() -> int:
    """Nodes that share the launcher's rendezvous (``GROUP_WORLD_SIZE`` of torchrun), 1 without one."""
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))
