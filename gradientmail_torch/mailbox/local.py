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
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
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

_SCRATCH = ".scratch"  # no key: never listed
_ABANDONED_S = 2 * 86400.0


class LocalMailbox:
    """``create=False`` makes nothing before the first write, so that who may only read can read."""

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        self.root = Path(root).expanduser().absolute()
        self._created = create
        with _translated(self.root, "<root>"):
            if create:
                (self.root / _SCRATCH).mkdir(parents=True, exist_ok=True)
            self._real_root = os.path.realpath(self.root)
            if create:
                self._sweep()

    def __repr__(self) -> str:
        return self.root.as_uri()

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        with _translated(self.root, key):
            try:
                with open(self._path(key), "rb", opener=_without_links) as file:
                    if not S_ISREG(os.fstat(file.fileno()).st_mode):
                        return None  # a pipe, say
                    file.seek(start)
                    return file.read() if length is None else file.read(length)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return None

    def put(self, key: str, body: Body) -> None:
        with self._written(key, body) as (scratch, path):
            os.replace(scratch, path)

    def put_if_absent(self, key: str, body: Body) -> bool:
        target = self._path(key)
        if os.path.lexists(target):  # spares writing a copy that would be refused
            if os.path.isdir(target):
                raise _clash(key)
            return False
        with self._written(key, body) as (scratch, path):
            try:
                os.link(scratch, path)
                return True
            except FileExistsError:
                # A network file system may repeat a request that was carried out, and refuse the second.
                return os.stat(scratch).st_nlink > 1

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        if folder:
            self._path(f"{folder}/any")  # refuses a way out of the root
        return self._walk(folder, prefix, after)

    def delete(self, key: str) -> None:
        with _translated(self.root, key):
            try:
                os.unlink(self._path(key))
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
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
        scratch = os.path.join(self._scratch(), uuid4().hex)
        with _translated(self.root, key):
            if not self._created:  # once: later, a folder that is not there is a volume that went away
                os.makedirs(os.path.dirname(scratch), exist_ok=True)
                self._created = True
            try:
                with open(scratch, "xb") as file:
                    source = BytesIO(body) if isinstance(body, (bytes, bytearray, memoryview)) else body
                    shutil.copyfileobj(source, file, 1 << 20)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                yield scratch, path
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                raise _clash(key) from None
            finally:
                Path(scratch).unlink(missing_ok=True)

    def _scratch(self) -> str:
        path = os.path.join(self._real_root, _SCRATCH)
        if os.path.islink(path):
            raise InvalidName(f"{path} is a link: links are not followed, remove it")
        return path

    def _sweep(self) -> None:
        """Remove what processes that were killed while writing have left, when it is days old."""
        scratch = Path(self._scratch())
        mark = scratch / uuid4().hex
        mark.touch()
        now = mark.stat().st_mtime  # by the file system's clock, as the others' times
        mark.unlink()
        for left in scratch.iterdir():
            with suppress(FileNotFoundError):
                if now - left.stat().st_mtime > _ABANDONED_S:
                    left.unlink()

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
            if entry.name == _SCRATCH and not folder:
                continue
            if name.endswith("/"):
                shared = min(len(path), len(prefix))
                if path[:shared] == prefix[:shared] and (path > after or after.startswith(path)):
                    yield from self._walk(path[:-1], prefix, after)
            elif path.startswith(prefix) and path > after and entry.is_file(follow_symlinks=False):
                yield path


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)  # a pipe that lies there must hold up nobody


def _clash(key: str) -> InvalidName:
    return InvalidName(f"mailbox key {key!r} cannot be kept in a directory: it is the folder of another object, or lies below one")


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
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return MailboxUnavailable(f"no room for {where}. Free some space: training goes on meanwhile")
        case _:
            return MailboxUnavailable(f"could not reach {where}")
