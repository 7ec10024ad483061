"""What travels between nodes: any JSON value, bytes, or a file of any size, which streams."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from typing import Annotated, BinaryIO, Literal, cast

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import DataRef, Record
from gradientmail_torch.patterns.json_values import from_json, to_json

INLINE_BYTES = 8 << 10
"""Payloads up to this size travel inside the record that announces them, and cost no object of their own."""
MAX_LOADED_BYTES = 1 << 30
"""The largest JSON value or bytes that is loaded into memory; a file has no such bound."""
CHUNK_BYTES = 4 << 20


class PayloadRef(Record, frozen=True):
    """A payload inside a record, or the object that holds it."""

    kind: Literal["json", "bytes", "file"]
    inline: Annotated[bytes, msgspec.Meta(max_length=INLINE_BYTES)] | None = None
    data: DataRef | None = None


class StoredFile:
    """A payload that was given as a file: read it in pieces, it need not fit in memory."""

    def __init__(self, mailbox: Mailbox, ref: DataRef) -> None:
        self._mailbox = mailbox
        self._ref = ref

    def __repr__(self) -> str:
        return f"StoredFile({self.size} bytes at {self._ref.key!r})"

    @property
    def size(self) -> int:
        """Bytes."""
        return self._ref.size

    def open(self) -> BinaryIO:
        """A readable, seekable file over ranged reads of 4 MiB. Its digest is not checked: :meth:`save` does."""
        return io.BufferedReader(_Ranges(self._mailbox, self._ref), CHUNK_BYTES)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to ``path``. Raises :class:`CorruptObject` when its length or digest is not the recorded one."""
        digest = hashlib.sha256()
        part = f"{os.fspath(path)}.part"
        try:
            with self.open() as source, open(part, "wb") as target:
                while piece := source.read(CHUNK_BYTES):
                    digest.update(piece)
                    target.write(piece)
            if digest.hexdigest() != self._ref.sha256:
                raise CorruptObject(f"{self._ref.key!r} in {self._mailbox!r} is not the object that was recorded: its digest differs")
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)


class _Ranges(io.RawIOBase):
    def __init__(self, mailbox: Mailbox, ref: DataRef) -> None:
        super().__init__()
        self._mailbox = mailbox
        self._ref = ref
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ref.size}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to {base + offset}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer)).cast("B")
        wanted = max(0, min(len(view), self._ref.size - self._position))
        if wanted == 0:
            return 0
        found = self._mailbox.get(self._ref.key, start=self._position, length=wanted)
        if found is None or len(found) != wanted:
            raise CorruptObject(f"{self._ref.key!r} in {self._mailbox!r} is gone or shorter than the {self._ref.size} bytes recorded")
        view[:wanted] = found
        self._position += wanted
        return wanted


def check(value: object, *, what: str) -> None:
    """Raises :class:`ConfigError` when ``value`` cannot travel, before anything is written."""
    if not isinstance(value, (bytes, bytearray, memoryview)) and not _is_file(value):
        to_json(value, what=what, finite=False)


def store(mailbox: Mailbox, value: object, key: Callable[[], str], *, what: str) -> PayloadRef:
    """Write ``value`` at ``key`` unless it is small, and say where it is.

    Raises :class:`ConfigError` that names ``what`` when it is neither a JSON value, bytes nor a binary file that
    can seek; nothing is written then. A file is read from its present position, twice: for its digest first.
    """
    if _is_file(value):
        return _store_file(mailbox, cast(BinaryIO, value), key(), what)
    kind: Literal["json", "bytes"] = "bytes" if isinstance(value, (bytes, bytearray, memoryview)) else "json"
    data = value if isinstance(value, (bytes, bytearray, memoryview)) else to_json(value, what=what, finite=False)
    if memoryview(data).nbytes <= INLINE_BYTES:
        return PayloadRef(kind=kind, inline=bytes(data))
    if memoryview(data).nbytes > MAX_LOADED_BYTES:
        raise ConfigError(f"{what} has {memoryview(data).nbytes} bytes, at most {MAX_LOADED_BYTES} fit: give an open binary file instead")
    name = key()
    ref = DataRef(key=name, size=memoryview(data).nbytes, sha256=hashlib.sha256(data).hexdigest(), wire="raw")
    mailbox.put(name, data)
    return PayloadRef(kind=kind, data=ref)


def load(mailbox: Mailbox, ref: PayloadRef, *, what: str) -> object:
    """The value that :func:`store` was given; a file as :class:`StoredFile`. Raises :class:`CorruptObject`."""
    if ref.kind == "file" and ref.data is not None:
        return StoredFile(mailbox, ref.data)
    data = ref.inline
    if ref.data is not None:
        data = messages.read_data(mailbox, ref.data, limit_bytes=MAX_LOADED_BYTES)
    if data is None:
        raise CorruptObject(f"{what} is gone: {ref.data.key if ref.data else 'its record holds none'!r} in {mailbox!r}")
    return data if ref.kind == "bytes" else from_json(data, what=what, finite=False)


def _store_file(mailbox: Mailbox, file: BinaryIO, key: str, what: str) -> PayloadRef:
    try:
        position = file.tell()
        digest, size = hashlib.sha256(), 0
        if not isinstance(file.read(0), bytes):
            raise ConfigError(f"{what} is a text file: open it with mode 'rb'")
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            size += len(piece)
        file.seek(position)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} cannot be read: {error}. It must be a binary file that can seek") from error
    mailbox.put(key, file)
    return PayloadRef(kind="file", data=DataRef(key=key, size=size, sha256=digest.hexdigest(), wire="raw"))


def _is_file(value: object) -> bool:
    return hasattr(value, "read") and hasattr(value, "seek")
