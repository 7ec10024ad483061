"""What is the directory mailbox's own: files, rights, links, crashes, a full disk."""

from __future__ import annotations

import errno
import io
import os
import resource
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gradientmail_torch.errors import InvalidName, MailboxDenied, MailboxError, MailboxMissing, MailboxUnavailable, MailboxUnsupported
from gradientmail_torch.mailbox.local import LocalMailbox, _translate
from gradientmail_torch.testing.contract import together
from gradientmail_torch.testing.faults import Crash

CONTENT = b"0123456789"


@pytest.fixture
def mailbox(tmp_path: Path) -> LocalMailbox:
    return LocalMailbox(tmp_path / "mailbox")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret").write_bytes(b"secret")
    return folder


def scratch(mailbox: LocalMailbox) -> list[Path]:
    return [*(mailbox.root / ".scratch").iterdir()]


def test_an_object_is_a_file_under_its_key(mailbox: LocalMailbox) -> None:
    mailbox.put("a/b", CONTENT)
    assert (mailbox.root / "a/b").read_bytes() == CONTENT
    assert repr(mailbox) == mailbox.root.as_uri()


class TestFolders:
    def test_a_folder_is_not_an_object(self, mailbox: LocalMailbox) -> None:
        mailbox.put("a/b/c", CONTENT)
        assert mailbox.get("a/b") is None
        assert mailbox.get("a/b/c/d") is None
        mailbox.delete("a/b")
        mailbox.delete("a/b/c/d")
        assert [*mailbox.list("")] == ["a/b/c"]

    @pytest.mark.parametrize("key", ["a/b", "a/b/c", "b"])
    def test_a_key_that_clashes_with_a_folder_is_refused_and_harms_nothing(self, mailbox: LocalMailbox, key: str) -> None:
        mailbox.put("a", CONTENT)
        mailbox.put("b/c", CONTENT)
        for write in (mailbox.put, mailbox.put_if_absent):
            with pytest.raises(InvalidName, match=f"'{key}' cannot be kept in a directory"):
                write(key, b"x")
        assert mailbox.get("a") == mailbox.get("b/c") == CONTENT
        assert scratch(mailbox) == []


class TestNoEscape:
    def test_a_link_to_a_file_is_neither_read_nor_listed(self, mailbox: LocalMailbox, outside: Path) -> None:
        (mailbox.root / "link").symlink_to(outside / "secret")
        with pytest.raises(MailboxDenied, match="Links are not followed"):
            mailbox.get("link")
        assert [*mailbox.list("")] == []
        assert not mailbox.put_if_absent("link", b"x")

    def test_writing_or_deleting_a_link_leaves_its_target(self, mailbox: LocalMailbox, outside: Path) -> None:
        (mailbox.root / "link").symlink_to(outside / "secret")
        mailbox.put("link", b"mine")
        assert mailbox.get("link") == b"mine"
        (mailbox.root / "other").symlink_to(outside / "secret")
        mailbox.delete("other")
        assert (outside / "secret").read_bytes() == b"secret"

    def test_a_link_to_a_folder_is_refused_by_every_operation(self, mailbox: LocalMailbox, outside: Path) -> None:
        (mailbox.root / "a").mkdir()
        (mailbox.root / "a/link").symlink_to(outside)
        operations: list[Callable[[], object]] = [
            lambda: mailbox.get("a/link/secret"),
            lambda: mailbox.put("a/link/secret", b"x"),
            lambda: mailbox.put_if_absent("a/link/new", b"x"),
            lambda: mailbox.delete("a/link/secret"),
            lambda: [*mailbox.list("a/link/")],
            lambda: [*mailbox.list("a/link/sec")],
        ]
        for operation in operations:
            with pytest.raises(InvalidName, match="through a link"):
                operation()
        assert [*mailbox.list("")] == [*mailbox.list("a/link")] == []
        assert [path.name for path in outside.iterdir()] == ["secret"]

    @pytest.mark.parametrize("prefix", ["../", "../outside/", "a/../../outside/", "/"])
    def test_a_listing_cannot_leave_the_root(self, mailbox: LocalMailbox, outside: Path, prefix: str) -> None:
        try:
            assert [*mailbox.list(prefix)] == []
        except InvalidName:
            pass

    def test_the_folder_for_writing_may_not_be_a_link(self, mailbox: LocalMailbox, outside: Path) -> None:
        (mailbox.root / ".scratch").rmdir()
        (mailbox.root / ".scratch").symlink_to(outside)
        for attempt in (lambda: LocalMailbox(mailbox.root), lambda: mailbox.put("a", b"x"), lambda: mailbox.put_if_absent("a", b"x")):
            with pytest.raises(InvalidName, match=r"\.scratch is a link"):
                attempt()
        assert [path.name for path in outside.iterdir()] == ["secret"]

    def test_a_pipe_is_no_object_and_holds_up_nobody(self, mailbox: LocalMailbox) -> None:
        os.mkfifo(mailbox.root / "pipe")
        assert mailbox.get("pipe") is None
        assert [*mailbox.list("")] == []
        assert not mailbox.put_if_absent("pipe", b"x")
        mailbox.put("pipe", b"mine")
        assert mailbox.get("pipe") == b"mine"

    def test_the_root_itself_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "volume").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "volume")
        mailbox = LocalMailbox(tmp_path / "link")
        mailbox.put("a", CONTENT)
        assert [*mailbox.list("")] == ["a"]
        assert (tmp_path / "volume/a").exists()


@pytest.mark.parametrize(("umask", "rights"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_rights_of_the_umask(mailbox: LocalMailbox, umask: int, rights: int) -> None:
    before = os.umask(umask)
    try:
        mailbox.put("put/a", CONTENT)
        mailbox.put_if_absent("created/a", CONTENT)
    finally:
        os.umask(before)
    for key in ("put/a", "created/a"):
        assert stat.S_IMODE((mailbox.root / key).stat().st_mode) == rights
        assert stat.S_IMODE((mailbox.root / key).parent.stat().st_mode) == rights | rights >> 2 & 0o111


class TestCrashes:
    @pytest.mark.parametrize("error", [Crash, KeyboardInterrupt, ValueError, MemoryError])
    def test_an_interrupted_write_leaves_nothing(self, mailbox: LocalMailbox, error: type[BaseException]) -> None:
        class Breaking(io.BytesIO):
            def read(self, size: int | None = -1) -> bytes:
                if self.tell():
                    raise error
                return super().read(1000)

        mailbox.put("old", CONTENT)
        for write, key in ((mailbox.put, "old"), (mailbox.put, "new")):
            with pytest.raises(error):
                write(key, Breaking(bytes(5000)))
        assert [*mailbox.list("")] == ["old"]
        assert mailbox.get("old") == CONTENT
        assert scratch(mailbox) == []

    def test_a_process_killed_while_writing_leaves_no_half_object(self, mailbox: LocalMailbox) -> None:
        mailbox.put("old", CONTENT)
        program = f"""
            import io, os, signal
            from gradientmail_torch.mailbox.local import LocalMailbox
            class Deadly(io.BytesIO):
                def read(self, size=-1):
                    if self.tell():
                        os.kill(os.getpid(), signal.SIGKILL)
                    return super().read(1 << 20)
            LocalMailbox({str(mailbox.root)!r}).put("old", Deadly(bytes(5 << 20)))
        """
        root = str(Path(__file__).parents[2])
        died = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env={**os.environ, "PYTHONPATH": root}, check=False)
        assert died.returncode == -9
        assert mailbox.get("old") == CONTENT
        assert [*mailbox.list("")] == ["old"]
        assert len(scratch(mailbox)) == 1

    def test_what_killed_writers_left_is_swept_when_it_is_days_old(self, mailbox: LocalMailbox) -> None:
        for name, age_s in (("abandoned", 3 * 86400), ("in-use", 3600)):
            path = mailbox.root / ".scratch" / name
            path.write_bytes(CONTENT)
            then = path.stat().st_mtime - age_s
            os.utime(path, (then, then))
        LocalMailbox(mailbox.root)
        assert [path.name for path in scratch(mailbox)] == ["in-use"]


def test_a_create_that_the_file_system_carried_out_twice_is_ours(mailbox: LocalMailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def repeating(source: str, target: str) -> None:  # as NFS does when an answer is lost
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeating)
    assert mailbox.put_if_absent("a", CONTENT)
    assert not mailbox.put_if_absent("a", b"other")
    assert mailbox.get("a") == CONTENT


def test_making_the_same_new_folder_at_once_is_no_conflict(mailbox: LocalMailbox) -> None:
    together(range(64), lambda number: mailbox.put(f"new/folder/{number % 4}/{number}", b""))
    assert len([*mailbox.list("")]) == 64


class TestErrors:
    @contextmanager
    def small_files(self, limit: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def test_a_disk_without_room_may_pass_and_harms_nothing(self, mailbox: LocalMailbox) -> None:
        mailbox.put("a", CONTENT)
        with self.small_files(4096), pytest.raises(MailboxUnavailable, match="Free some space"):
            mailbox.put("a", bytes(1 << 20))
        assert mailbox.get("a") == CONTENT
        assert scratch(mailbox) == []

    def test_a_root_below_a_file_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(MailboxMissing, match="Is the volume mounted"):
            LocalMailbox(tmp_path / "file/run")

    def test_a_volume_that_goes_away_is_named(self, mailbox: LocalMailbox) -> None:
        mailbox.root.rename(mailbox.root.with_name("moved"))
        assert mailbox.get("a") is None
        with pytest.raises(MailboxMissing, match=r"'a'.*Is the volume mounted"):
            mailbox.put("a", CONTENT)

    @pytest.mark.parametrize(
        ("number", "kind", "cure"),
        [
            (errno.EACCES, MailboxDenied, "read and write rights"),
            (errno.EROFS, MailboxDenied, "read and write rights"),
            (errno.EXDEV, MailboxUnsupported, "hard links"),
            (errno.ENOSPC, MailboxUnavailable, "Free some space"),
            (errno.EDQUOT, MailboxUnavailable, "Free some space"),
            (errno.EIO, MailboxUnavailable, "could not reach"),
            (errno.ESTALE, MailboxUnavailable, "could not reach"),
        ],
    )
    def test_each_failure_of_the_system_has_its_kind_and_its_cure(self, number: int, kind: type[MailboxError], cure: str) -> None:
        error = _translate(OSError(number, os.strerror(number)), Path("/runs"), "a/b")
        assert type(error) is kind
        assert "'a/b'" in str(error)
        assert "/runs" in str(error)
        assert cure in str(error)
