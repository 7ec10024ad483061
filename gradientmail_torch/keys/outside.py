"""What those who look at a mailbox from outside need besides: the command and its examination of a store."""

from __future__ import annotations

from gradientmail_torch.keys.names import decode_name, encode_name, join

LEARNERS = "learners/"
INITIAL = "init/"
BARRIERS = "barriers/"
QUEUES = "queues/"
CAMPAIGNS = "steering/"
PROBES = "probe/"


def segment_below(prefix: str, key: str) -> str:
    """The segment of ``key`` that follows ``prefix``, decoded."""
    return decode_name(key[len(prefix) :].split("/", 1)[0])


def behind_segment(prefix: str, name: str) -> str:
    """What sorts behind every key of the pattern ``name`` below ``prefix``."""
    return f"{prefix}{encode_name(name)}/~"


def doctor(nonce: str, name: str) -> str:
    """An object that an examination of the store writes and deletes."""
    return join("probe", f"doctor-{nonce}", name)


def doctor_prefix(nonce: str) -> str:
    return f"probe/doctor-{nonce}/"
