"""The grammar of keys: names as segments, numbers that sort, and what every store can hold."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from gradientmail_torch.errors import ConfigError, InvalidName

MAX_NAME_BYTES = 200  # a file name holds 255; room for a nonce beside the name
MAX_SEGMENT_BYTES = 255
MAX_KEY_BYTES = 900  # S3 holds 1024; room for the run's prefix
_VALID_KEY = re.compile(r"(?!.*//)[A-Za-z0-9._~%-][A-Za-z0-9._~%/-]*(?<!/)")


def encode_name(name: str, *, what: str = "name") -> str:
    """``name`` as one segment of a key. Raises :class:`InvalidName` when empty or too long."""
    if not isinstance(name, str) or not name:
        raise InvalidName(f"{what} must be a non-empty string, not {name!r}")
    try:
        encoded = quote(name, safe="")
    except UnicodeEncodeError:
        raise InvalidName(f"{what} {name!r} holds half a surrogate pair, which no store can hold") from None
    if set(name) == {"."}:  # "." and ".." mean something to a directory
        encoded = encoded.replace(".", "%2E")
    if len(encoded) > MAX_NAME_BYTES:
        raise InvalidName(f"{what} {name[:40]!r}… takes {len(encoded)} bytes in a key, at most {MAX_NAME_BYTES} fit: shorten it")
    return encoded


def decode_name(segment: str) -> str:
    return unquote(segment)


LEARNER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_learner_id(learner_id: str) -> str:
    """A learner ID that reads the same in a key, a file name and a table; raises :class:`ConfigError`."""
    if not isinstance(learner_id, str) or not LEARNER_ID.fullmatch(learner_id):
        raise ConfigError(
            f"learner_id {learner_id!r} cannot be used: 1 to 100 letters, digits, '.', '_' and '-', "
            "the first a letter or digit (for example 'node-0')"
        )
    return learner_id


def check_key(key: str) -> str:
    """``key`` if every store can hold it, a directory included; raises :class:`InvalidName`."""
    if not _VALID_KEY.fullmatch(key) or any(set(part) == {"."} for part in key.split("/")):
        raise InvalidName(f"mailbox key {key[:MAX_KEY_BYTES]!r} is not a path of non-empty segments of letters, digits and . _ ~ % -")
    if len(key) > MAX_KEY_BYTES or max(map(len, key.split("/"))) > MAX_SEGMENT_BYTES:
        raise InvalidName(
            f"mailbox key {key[:MAX_NAME_BYTES]!r}… is too long: at most {MAX_KEY_BYTES} bytes, {MAX_SEGMENT_BYTES} in a segment"
        )
    return key


def join(*segments: str) -> str:
    return "/".join(segments)


def number(value: int, width: int = 10) -> str:
    return f"{value:0{width}d}"


def parse_number(text: str, width: int) -> int:
    """What :func:`number` has written; ``int`` alone would take -5, 1_0 and 5 as well."""
    if not text.isdecimal() or number(int(text), width) != text:
        raise ValueError(text)
    return int(text)


def last_segment(key: str) -> str:
    return key.rsplit("/", 1)[-1]
