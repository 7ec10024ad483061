"""From a URL to a mailbox that can be relied on."""

from __future__ import annotations

import os
import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit
from uuid import uuid4

from gradientmail_torch import config
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError, MailboxUnsupported
from gradientmail_torch.mailbox.base import Mailbox
from gradientmail_torch.mailbox.local import LocalMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.mailbox.signed import SignedMailbox
from gradientmail_torch.mailbox.wrappers import RetryingMailbox

_FORMS = "'s3://bucket/prefix?endpoint_url=…&region=…', 'file:///path', a plain path, or 'memory://name'"


def open_mailbox(
    url: str | os.PathLike[str] | Mailbox, *, run_key: str | None = None, clock: Clock = SYSTEM_CLOCK, probed: bool = True
) -> Mailbox:
    """The mailbox behind ``url``: {forms}.

    A bucket is probed first: a store that ignores conditional writes is refused with
    :class:`~gradientmail_torch.errors.MailboxUnsupported`, a missing one with ``MailboxMissing``, missing
    rights with ``MailboxDenied``. A mailbox that is given instead of a URL is returned as it is. ``probed=False``
    opens without a request and makes no directory, for those who only read. With a ``run_key``, given or in
    ``GRADIENTMAIL_RUN_KEY``, every object is signed, and what is not is refused
    (:mod:`gradientmail_torch.mailbox.signed`).
    """
    if not isinstance(url, (str, os.PathLike)):
        if isinstance(url, Mailbox):
            return url
        raise ConfigError(f"mailbox must be a URL or a Mailbox, not {type(url).__name__}: {_FORMS}")
    mailbox = _open(os.fspath(url), clock=clock, probed=probed)
    secret = run_key or config.run_key()
    return SignedMailbox(mailbox, secret) if secret else mailbox


def _open(text: str, *, clock: Clock, probed: bool) -> Mailbox:
    if not text:
        raise ConfigError(f"the mailbox URL is empty: it is {_FORMS}")
    if "://" in text and "@" in text:  # said without the URL, which would carry them into a log
        raise ConfigError("a mailbox URL holds no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead")
    if re.match(r"(s3|file|memory|gs|https?):(?!//)", text):  # what Path makes of a URL; each node would train alone, in a directory "s3:"
        raise ConfigError(f"mailbox URL {text!r} lacks a slash: use {_FORMS}; a URL is no Path")
    parts = urlsplit(text)
    match parts.scheme if "://" in text else "":
        case "":
            return RetryingMailbox(LocalMailbox(text, create=probed), clock=clock)
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path:
                raise ConfigError(f"mailbox URL {text!r}: a file URL has three slashes, 'file:///path'")
            return RetryingMailbox(LocalMailbox(unquote(parts.path), create=probed), clock=clock)
        case "memory":
            return MemoryMailbox.named(parts.netloc + parts.path)
        case "s3":
            mailbox = RetryingMailbox(_s3(text, parts), clock=clock)
            if probed:
                probe(mailbox)
            return mailbox
        case scheme:
            raise ConfigError(f"mailbox URL {text!r} has the unknown scheme {scheme!r}: use {_FORMS}")


def _s3(text: str, parts: SplitResult) -> Mailbox:
    from gradientmail_torch.mailbox.s3 import S3Mailbox  # boto3 takes a while to import, and only S3 needs it

    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - {"endpoint_url", "region"}
    if unknown or not parts.hostname:
        problem = f"unknown parameter {sorted(unknown)[0]!r}" if unknown else "no bucket"
        shown = text.partition("?")[0]  # a value that belongs elsewhere may be a secret
        raise ConfigError(f"mailbox URL {shown!r}: {problem}; it is 's3://bucket/prefix?endpoint_url=…&region=…'")
    return S3Mailbox(parts.netloc, unquote(parts.path), endpoint_url=options.get("endpoint_url"), region=options.get("region"))


def probe(mailbox: Mailbox) -> None:
    """See that a second create is refused and leaves the object unchanged; raises ``MailboxUnsupported``."""
    key = f"probe/{uuid4().hex}"
    next(mailbox.list(key), None)  # first, as some stores make a missing bucket at a write
    created = mailbox.put_if_absent(key, b"first")
    try:
        if not created or mailbox.put_if_absent(key, b"second") or mailbox.get(key) != b"first":
            raise MailboxUnsupported(
                f"{mailbox!r} ignores 'If-None-Match: *', so two learners could commit the same round. Use a store that "
                "honours conditional writes: AWS S3, Cloudflare R2, MinIO, SeaweedFS, or a directory"
            )
    finally:
        mailbox.delete(key)


if open_mailbox.__doc__:
    open_mailbox.__doc__ = open_mailbox.__doc__.format(forms=_FORMS)
