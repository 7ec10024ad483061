"""Heartbeats for a process whose threads may be frozen by one long call into C that holds Python's global lock.

``BeatHelper`` starts ``python -m gradientmail_torch.patterns.beat_helper``, which repeats the owner's last beat while
the owner is silent, for a stated time at most: so a suspended owner is taken for dead in the end. It ends with the
owner, whose end of the pipe closes then.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, MailboxError
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.messages import Count, Nonce, Record

_ENDING_S = 10.0


class Beat(Record, frozen=True):
    """A heartbeat of a party, overwritten by that party alone."""

    count: Count
    holds: tuple[Nonce, ...]
    """Nonces of the claims that the party works on."""
    ended: bool = False
    helped: Count = 0
    """How often a helper has repeated this beat while the party was frozen."""
    at: float = 0.0
    """Seconds since 1970 by the party's clock; for people."""

    def gave_up(self, nonce: str, since: int) -> bool:
        """Whether the party no longer holds claim ``nonce``, which it began when its newest beat was ``since``."""
        return self.ended or (self.count > since and nonce not in self.holds)


class BeatHelper:
    """The owner's end of the pipe.

    Args:
        url: of the mailbox; another process must be able to open it.
        key: of the owner's beats.
        interval: seconds between two beats.
        max_freeze: seconds for which the helper beats without hearing from the owner.
    """

    def __init__(self, url: str, key: str, *, interval: float, max_freeze: float) -> None:
        arguments = [url, key, repr(interval), repr(max_freeze)]
        command = [sys.executable, "-m", "gradientmail_torch.patterns.beat_helper", *arguments]
        # A session of its own: Ctrl-C is for the owner, and ends the helper by the pipe.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def tell(self, beat: Beat) -> None:
        """What to repeat from now on. Never waits."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, or does not read: there is no help then
            os.write(self._process.stdin.fileno(), messages.encode(beat) + b"\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def check_url(mailbox: object, max_freeze: float) -> str | None:
    """The URL for a helper, None where none is wanted; raises :class:`ConfigError`."""
    if not max_freeze >= 0:
        raise ConfigError(f"max_freeze must be at least 0 seconds, not {max_freeze!r}")
    if max_freeze == 0:
        return None
    if not isinstance(mailbox, (str, os.PathLike)) or os.fspath(mailbox).startswith("memory:"):
        raise ConfigError("max_freeze needs a mailbox that another process can open: give its URL, a directory or s3://…")
    return os.fspath(mailbox)


def help_out(mailbox: Mailbox, key: str, *, interval: float, max_freeze: float, source: int) -> None:
    """Read beats from the file descriptor ``source``, and repeat the last one while no other comes, until it closes."""
    last, heard, repeats, unread = None, SYSTEM_CLOCK.monotonic(), 0, b""
    while True:
        ready, _, _ = select.select([source], [], [], interval)
        if ready:
            piece = os.read(source, 1 << 16)
            if not piece:
                return
            *lines, unread = (unread + piece).split(b"\n")
            if lines:
                last, heard, repeats = messages.decode(Beat, lines[-1], key="the owner's beat"), SYSTEM_CLOCK.monotonic(), 0
        elif last is not None and last.holds and SYSTEM_CLOCK.monotonic() - heard <= max_freeze:
            repeats += 1
            with contextlib.suppress(MailboxError):
                mailbox.put(key, messages.encode(msgspec.structs.replace(last, helped=repeats)))


if __name__ == "__main__":
    url, key, interval, max_freeze = sys.argv[1:]
    box = open_mailbox(url, probed=False)
    help_out(box, key, interval=float(interval), max_freeze=float(max_freeze), source=sys.stdin.fileno())
