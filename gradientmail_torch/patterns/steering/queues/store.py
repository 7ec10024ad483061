"""Tasks and results as objects of a mailbox: a small record, and each large value an object of its own.

Large values go first, under names that nobody else writes, and the record that names them second.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gradientmail_torch import messages
from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.keys import TaskKeys
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.messages import MAX_RECORD_BYTES, DataRef
from gradientmail_torch.patterns.steering.result import Result
from gradientmail_torch.patterns.steering.serialization import Payload
from gradientmail_torch.patterns.steering.wire import dump, form_of, load

_INLINE_TOTAL_BYTES = 1 << 20


class TaskStore:
    def __init__(self, mailbox: Mailbox, keys: TaskKeys, *, inline_bytes: int, limit_bytes: int, allow_pickle: bool) -> None:
        self.mailbox = mailbox
        self.keys = keys
        self._inline_bytes = inline_bytes
        self._limit_bytes = limit_bytes
        self._allow_pickle = allow_pickle

    def dump(self, result: Result, item: str, nonce: str, *, limit_bytes: int = MAX_RECORD_BYTES) -> tuple[bytes, list[str]]:
        """The record of a serialized result, and the keys of its large values, which are written under ``nonce``."""
        room = _INLINE_TOTAL_BYTES
        written: list[str] = []

        def place(payload: Payload) -> Any:
            nonlocal room
            size = len(payload.data)
            if size <= min(self._inline_bytes, room):
                room -= size
                return payload.text()
            if size > self._limit_bytes:
                raise ConfigError(
                    f"a value of {size} bytes is more than the {self._limit_bytes} that this queue takes: raise max_value_bytes"
                )
            key = self.keys.data(item, nonce, len(written))
            written.append(key)
            self.mailbox.put(key, payload.data)
            return msgspec.to_builtins(messages.reference(key, payload.data, wire=payload.form))

        record = dump(result, place)
        if len(record) > limit_bytes:
            raise ConfigError(f"task_info makes a record of {len(record)} bytes, at most {limit_bytes} fit: pass it as an argument")
        return record, written

    def load(self, record: bytes) -> Result:
        """The result in ``record``, its large values as references. Raises :class:`CorruptObject`."""
        return load(record, self._reference, allow_pickle=self._allow_pickle)

    def fetch(self, result: Result) -> Result:
        """Replace the references in ``result`` by what they name. Raises :class:`CorruptObject`."""
        args, kwargs = result.inputs
        result.inputs = (tuple(self._fetched(value) for value in args), {name: self._fetched(value) for name, value in kwargs.items()})
        result.value = self._fetched(result.value)
        return result

    def has_data(self, result: Result) -> bool:
        """Whether any value of the task may be an object of its own."""
        return any(size > self._inline_bytes for size in result.message_sizes.values())

    def delete_data(self, item: str) -> None:
        for key in self.mailbox.list(self.keys.data_of(item)):
            self.mailbox.delete(key)

    def _reference(self, content: dict[str, Any]) -> DataRef:
        try:
            found = msgspec.convert(content, DataRef)
        except msgspec.ValidationError as error:
            raise CorruptObject(f"a task message has a reference that is none: {error}") from error
        if not found.key.startswith(self.keys.all_data()):
            raise CorruptObject(f"a task message refers to {found.key[:200]!r}, which is no value of this queue")
        form_of(found.wire, allow_pickle=self._allow_pickle)
        return found

    def _fetched(self, value: Any) -> Any:
        if not isinstance(value, DataRef):
            return value
        data = messages.read_data(self.mailbox, value, limit_bytes=self._limit_bytes)
        if data is None:
            raise CorruptObject(f"the value {value.key!r} is gone from {self.mailbox!r}")
        return Payload(data, form_of(value.wire, allow_pickle=self._allow_pickle))
