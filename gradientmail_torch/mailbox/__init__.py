"""Named objects in a store that all learners reach."""

from gradientmail_torch.mailbox.base import Body, Mailbox
from gradientmail_torch.mailbox.opening import open_mailbox, probe
from gradientmail_torch.mailbox.signed import SignedMailbox, is_signed
from gradientmail_torch.mailbox.wrappers import CountingMailbox, PrefixedMailbox, RetryingMailbox, Usage

__all__ = [
    "Body",
    "CountingMailbox",
    "Mailbox",
    "PrefixedMailbox",
    "RetryingMailbox",
    "SignedMailbox",
    "Usage",
    "is_signed",
    "open_mailbox",
    "probe",
]
