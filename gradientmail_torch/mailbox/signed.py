"""Objects that only those who hold the run's key can have written.

An object is a mark and a row of frames, each a chunk of the content, one byte that tells the last frame, and an
HMAC-SHA256 over the object's key, the frame's number, that byte and the chunk. So an object that is unsigned,
altered, truncated or copied under another key is refused, and any part of a large one can be read alone. Use a
new key for each run: with the same key, an object of one run is good in another under the same name. What a
listing shows is not signed; whoever acts on a name alone reads the object.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from io import BytesIO
from tempfile import TemporaryFile
from typing import BinaryIO, NamedTuple

from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.mailbox.base import Body, Mailbox
from gradientmail_torch.messages import SIGNED_MARK as MARK

CHUNK_BYTES = 1 << 20
_MAC_BYTES = 32
_FRAME_BYTES = CHUNK_BYTES + 1 + _MAC_BYTES
SHORTEST_KEY = 16


class _Frame(NamedTuple):
    chunk: bytes
    last: bool


class SignedMailbox:
    """``run_key`` is a secret of at least 16 characters that all learners of the run hold."""

    def __init__(self, inner: Mailbox, run_key: str) -> None:
        if len(run_key) < SHORTEST_KEY:
            maker = 'python -c "import secrets; print(secrets.token_hex())"'
            raise ConfigError(f"run_key must have at least {SHORTEST_KEY} characters: make one with {maker}")
        self.inner = inner
        self._secret = hashlib.sha256(b"gradientmail run key\0" + run_key.encode()).digest()

    def __repr__(self) -> str:
        return repr(self.inner)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        if length == 0:
            length = 1 if start == 0 else None  # reads something, so that what is returned has been verified
            found = self.get(key, start=start, length=length)
            return None if found is None else b""
        first = start // CHUNK_BYTES
        frames = None if length is None else (start + length - 1) // CHUNK_BYTES - first + 1
        chunks = self._read(key, first, frames)
        if chunks is None:
            return None
        content = b"".join(chunks)[start - first * CHUNK_BYTES :]
        return content if length is None else content[:length]

    def put(self, key: str, body: Body) -> None:
        if isinstance(body, (bytes, bytearray, memoryview)):
            self.inner.put(key, b"".join(self._sealed(key, BytesIO(body))))
            return
        with TemporaryFile() as file:
            for piece in self._sealed(key, body):
                file.write(piece)
            file.seek(0)
            self.inner.put(key, file)

    def put_if_absent(self, key: str, body: Body) -> bool:
        source = BytesIO(body) if isinstance(body, (bytes, bytearray, memoryview)) else body
        return self.inner.put_if_absent(key, b"".join(self._sealed(key, source)))

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        return self.inner.list(prefix, after=after)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def _sealed(self, key: str, source: BinaryIO) -> Iterator[bytes]:
        yield MARK
        chunk = source.read(CHUNK_BYTES)
        number = 0
        while True:
            following = source.read(CHUNK_BYTES) if len(chunk) == CHUNK_BYTES else b""
            last = not following
            yield chunk + (b"\1" if last else b"\0") + self._mac(key, number, last, chunk)
            if last:
                return
            chunk, number = following, number + 1

    def _read(self, key: str, first: int, frames: int | None) -> Iterable[bytes] | None:
        """The verified chunks from number ``first`` on, at most ``frames`` of them; None when absent."""
        begin = len(MARK) + first * _FRAME_BYTES if first else 0
        size = None if frames is None else frames * _FRAME_BYTES + (0 if first else len(MARK))
        raw = self.inner.get(key, start=begin, length=size)
        if raw is None:
            return None
        if first == 0:
            if raw[: len(MARK)] != MARK:
                raise CorruptObject(f"{key!r} in {self!r} is not signed: another program wrote it, or a learner without the run's key")
            raw = raw[len(MARK) :]
        elif not raw:
            self._check_ends_before(key, first)
            return []
        found = list(self._verified(key, first, raw))
        if not found[-1].last and (frames is None or len(found) < frames):
            raise CorruptObject(f"{key!r} in {self!r} is cut off")
        return [frame.chunk for frame in found]

    def _verified(self, key: str, first: int, raw: bytes) -> Iterator[_Frame]:
        view = memoryview(raw)
        for number, offset in enumerate(range(0, max(1, len(raw)), _FRAME_BYTES), start=first):
            frame = view[offset : offset + _FRAME_BYTES]
            chunk, last, mac = (
                bytes(frame[: -_MAC_BYTES - 1]),
                bytes(frame[-_MAC_BYTES - 1 : -_MAC_BYTES]) == b"\1",
                bytes(frame[-_MAC_BYTES:]),
            )
            if not hmac.compare_digest(mac, self._mac(key, number, last, chunk)):
                raise CorruptObject(f"{key!r} in {self!r} is not signed with this run's key, or was altered or copied there")
            yield _Frame(chunk, last)

    def _check_ends_before(self, key: str, first: int) -> None:
        """A read behind the end gives nothing; that the object ends there must be signed too."""
        for number in range(first - 1, -1, -1):
            if number == 0 or self.inner.get(key, start=len(MARK) + number * _FRAME_BYTES, length=1):
                self._read(key, number, None)
                return

    def _mac(self, key: str, number: int, last: bool, chunk: bytes) -> bytes:
        mac = hmac.new(self._secret, digestmod=hashlib.sha256)
        name = key.encode()
        mac.update(len(name).to_bytes(4, "big") + name + number.to_bytes(8, "big") + (b"\1" if last else b"\0"))
        mac.update(chunk)
        return mac.digest()


def is_signed(mailbox: Mailbox) -> bool:
    """Whether a mailbox, or one that it wraps, verifies what it reads."""
    at: object = mailbox
    while at is not None and not isinstance(at, SignedMailbox):
        at = getattr(at, "inner", None)
    return at is not None
