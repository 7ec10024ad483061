"""The mailbox: five operations on named objects, which is all that a run needs of the outside world.

``put_if_absent`` is the only conditional operation, and the weakest store that has it will do (S3
``If-None-Match: *``). What has one writer is overwritten by that writer alone; what several may write is
created once and never changed. Large bytes never ride on a conditional write: tensors go first, under a key
that nobody else writes, then a small record that names them is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, Protocol, runtime_checkable

Body = bytes | bytearray | memoryview | BinaryIO
"""What can be written: bytes, or a seekable binary file, which is read from its present position."""


@runtime_checkable
class Mailbox(Protocol):
    """A flat store of named objects, used by many threads and machines at once.

    Keys are of :func:`gradientmail_torch.keys.check_key`. Reads see every write that ended before they
    began; readers never see half an object. All operations raise
    :class:`~gradientmail_torch.errors.MailboxError` or one of its kind, and nothing of the backend's own.

    Stores that are trees inside (directories, SeaweedFS) set two limits. No key may be the folder of another
    (``a`` beside ``a/b``): such a key may be refused, and what it reads as is open. And folders that lie side
    by side may be listed by their names alone, which differs from the order of bytes where one name goes on
    from another with a character below "/" (``a`` and ``a-b``).
    """

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        """The bytes ``[start, start + length)`` of an object, fewer where it ends before; None when absent."""
        ...

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        ...

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object if none of that name exists. True for exactly one of any number of callers."""
        ...

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        """The keys that begin with ``prefix`` and sort behind ``after``, in order of their bytes.

        A listing of many keys takes a request a thousand, and shows
        what was there when it began and has stayed; what comes or goes meanwhile may be in it or not.
        """
        ...

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens when there is none."""
        ...


def read_body(body: Body) -> bytes:
    """``body`` as bytes, for backends that hold objects in memory."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, (bytearray, memoryview)):
        return bytes(body)
    return body.read()


def body_size(body: Body) -> int:
    """Length of ``body`` in bytes; a file's position is left where it was."""
    if isinstance(body, memoryview):
        return body.nbytes
    if isinstance(body, (bytes, bytearray)):
        return len(body)
    position = body.tell()
    size = body.seek(0, 2) - position
    body.seek(position)
    return size
