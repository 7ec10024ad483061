"""A mailbox in a directory: no server and no account. A folder shared over a network serves several machines.

An object is a file. It is written under a name of its own first and then linked (create) or renamed (replace)
to its key, so readers never see half an object. Keys cannot leave the root, and links that lead out of it are
not followed. Files get the rights that the process's umask gives. Written data is handed to the operating
system, not forced to the disk: a power cut of the machine that holds the directory may lose the last seconds.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from uuid import uuid4

from gradientmail_torch.errors import (
    InvalidName,
    MailboxDenied,
    MailboxError,
    MailboxMissing,
    MailboxUnavailable,
    MailboxUnsupported,
)
from gradientmail_torch.keys import check_key
from gradientmail_torch.mailbox.base import Body

_SCRATCH = ".scratch"  # begins with a dot and holds no key: never listed


class LocalMailbox:
    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).expanduser().absolute()
        with _translated(self.root, "<root>"):
            (self.root / _SCRATCH).mkdir(parents=True, exist_ok=True)
            self._real_root = os.path.realpath(self.root)

    def __repr__(self) -> str:
        return self.root.as_uri()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        with _translated(self.root, key):
            try:
                descriptor = os.open(self._path(key), os.O_RDONLY | os.O_NOFOLLOW)
            except (FileNotFoundError, NotADirectoryError):
                return None
            with os.fdopen(descriptor, "rb") as file:
                file.seek(start)
                return file.read() if length is None else file.read(length)

    def put(self, key: str, body: Body) -> None:
        with self._written(key, body) as (scratch, path):
            os.replace(scratch, path)

    def put_if_absent(self, key: str, body: Body) -> bool:
        if os.path.lexists(self._path(key)):  # spares writing a copy that would be refused
            return False
        with self._written(key, body) as (scratch, path):
            try:
                os.link(scratch, path)
            except FileExistsError:
                return False
            finally:
                os.unlink(scratch)
            return True

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        return self._walk(folder, prefix, after)

    def delete(self, key: str) -> None:
        with _translated(self.root, key):
            try:
                os.unlink(self._path(key))
            except (FileNotFoundError, NotADirectoryError):
                return

    def _path(self, key: str) -> str:
        path = os.path.join(self._real_root, check_key(key))
        parent = os.path.dirname(path)
        if os.path.realpath(parent) != parent:
            raise InvalidName(f"{key!r} leads through a link inside {self.root}: links are not followed, remove it")
        return path

    @contextmanager
    def _written(self, key: str, body: Body) -> Iterator[tuple[str, str]]:
        """``body`` in a scratch file, and the path it is meant for, whose folder exists."""
        path = self._path(key)
        scratch = os.path.join(self._real_root, _SCRATCH, uuid4().hex)
        with _translated(self.root, key):
            try:
                with open(scratch, "xb") as file:
                    source = BytesIO(body) if isinstance(body, (bytes, bytearray, memoryview)) else body
                    shutil.copyfileobj(source, file, 1 << 20)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                yield scratch, path
            except OSError:
                Path(scratch).unlink(missing_ok=True)
                raise

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[str]:
        try:
            with os.scandir(os.path.join(self._real_root, folder)) as found:
                # A folder sorts by its name and the "/" that follows it, as its keys do.
                entries = sorted((e.name + ("/" if e.is_dir(follow_symlinks=False) else ""), e) for e in found)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _translate(error, self.root, folder) from error
        for name, entry in entries:
            path = f"{folder}/{name}" if folder else name
            if entry.name == _SCRATCH and not folder or entry.is_symlink():
                continue
            if name.endswith("/"):
                shared = min(len(path), len(prefix))
                if path[:shared] == prefix[:shared] and (path > after or after.startswith(path)):
                    yield from self._walk(path[:-1], prefix, after)
            elif path.startswith(prefix) and path > after:
                yield path


@contextmanager
def _translated(root: Path, key: str) -> Iterator[None]:
    """Turn what the operating system raises into an error of our tree."""
    try:
        yield
    except OSError as error:
        raise _translate(error, root, key) from error


def _translate(error: OSError, root: Path, key: str) -> MailboxError:
    where = f"{key!r} in the directory mailbox {root}: {error.strerror or error}"
    match error.errno:
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return MailboxDenied(f"no permission for {where}. Give this user read and write rights on the folder")
        case errno.ENOENT | errno.ENOTDIR:
            return MailboxMissing(f"cannot reach {where}. Is the volume mounted?")
        case errno.EOPNOTSUPP | errno.EMLINK | errno.EXDEV:
            return MailboxUnsupported(f"cannot link {where}. The file system must support hard links")
        case errno.ELOOP:
            return MailboxDenied(f"refused {where}. Links are not followed")
        case errno.ENOSPC | errno.EDQUOT:
            return MailboxUnavailable(f"no room for {where}. Free some space: training goes on meanwhile")
        case _:
            return MailboxUnavailable(f"could not reach {where}")
