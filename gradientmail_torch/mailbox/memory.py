"""A mailbox in this process's memory: for tests, notebooks and several sessions in one process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from gradientmail_torch.keys import check_key
from gradientmail_torch.mailbox.base import Body, read_body

_named: dict[str, MemoryMailbox] = {}
_named_lock = threading.Lock()


class MemoryMailbox:
    def __init__(self, name: str = "") -> None:
        self.name = name or f"unnamed-{id(self):x}"
        self._objects: dict[str, bytes] = {}
        self._sorted: list[str] = []
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryMailbox:
        """The one mailbox of this name in the process, made on first use."""
        with _named_lock:
            return _named.setdefault(name, cls(name))

    def __repr__(self) -> str:
        return f"memory://{self.name}"

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        with self._lock:
            found = self._objects.get(check_key(key))
        if found is None or (start == 0 and length is None):
            return found
        return found[start:] if length is None else found[start : start + length]

    def put(self, key: str, body: Body) -> None:
        data = read_body(body)
        with self._lock:
            self._store(check_key(key), data)

    def put_if_absent(self, key: str, body: Body) -> bool:
        data = read_body(body)
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._store(key, data)
            return True

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        with self._lock:
            begin = max(bisect_left(self._sorted, prefix), bisect_right(self._sorted, after))
            end = bisect_left(self._sorted, prefix + "\U0010ffff")
            found = self._sorted[begin:end]
        return iter(found)

    def delete(self, key: str) -> None:
        with self._lock:
            if self._objects.pop(check_key(key), None) is not None:
                self._sorted.pop(bisect_left(self._sorted, key))

    def _store(self, key: str, data: bytes) -> None:
        if key not in self._objects:
            insort(self._sorted, key)
        self._objects[key] = data
