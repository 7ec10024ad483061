"""Results as messages: Colmena's JSON, in which each value is a string, or a reference to where its bytes are.

Messages may come from anyone who can write to the queue: they are read with their types checked, and a pickled
value is refused unless the reader has chosen to accept it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import msgspec

from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.patterns.steering.result import (
    FailureInformation,
    ResourceRequirements,
    Result,
    TimeSpans,
    Timestamps,
    WorkerInformation,
)
from gradientmail_torch.patterns.steering.serialization import METHODS, Form, Payload

T = TypeVar("T")
Place = Callable[[Payload], "str | dict[str, Any]"]
"""Puts a value's bytes somewhere: returns its text, or a reference to it."""
Fetch = Callable[[dict[str, Any]], Any]
"""Gets the bytes that such a reference names, or a reference of its own to get them by later."""

_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
PICKLE_REFUSED = (
    "this queue does not take pickled values, which can run any code on the machine that reads them. Use "
    "serialization_method='json'; or a mailbox that is signed with a run key, so that only its holders can write; or, where "
    "everyone who can write to the queue is trusted, 'pickle' on both sides"
)


def dump(result: Result, place: Place) -> bytes:
    """A serialized result as strict JSON; ``place`` is called for each of its values."""
    content = result.to_dict()
    args, kwargs = result.inputs
    content["inputs"] = [[_placed(value, place) for value in args], {name: _placed(value, place) for name, value in kwargs.items()}]
    if result.value is not None:
        content["value"] = _placed(result.value, place)
    try:
        return msgspec.json.encode(_without_nan(content))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"task_info must be plain JSON values: {error}") from error


def load(data: bytes | str, fetch: Fetch | None, *, allow_pickle: bool) -> Result:
    """The result in ``data``, its values as payloads; without ``fetch``, as they are. Raises :class:`CorruptObject` for anything else."""
    try:
        # NaN is not JSON, but Colmena writes it for a mark that is not set.
        content = json.loads(data, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"a task message is not JSON: {error}") from error
    return parse(content, fetch, allow_pickle=allow_pickle)


def result_from_json(text: bytes | str) -> Result:
    """The result that :meth:`Result.json` has written, say into a log; its values are what JSON made of them."""
    return load(text, None, allow_pickle=True)


def parse(content: Any, fetch: Fetch | None, *, allow_pickle: bool) -> Result:
    """:func:`load`, for JSON that has been read."""
    if not isinstance(content, dict):
        raise CorruptObject("a task message is not a JSON object")
    method = content.get("serialization_method", "json")
    if method not in METHODS:
        raise CorruptObject(f"a task message has the unknown serialization method {str(method)[:40]!r}")
    if method == "pickle" and not allow_pickle:
        raise CorruptObject(PICKLE_REFUSED)

    def payload(value: Any) -> Any:
        if fetch is None:
            return value
        match value:
            case str():
                return Payload.from_text(value, method)
            case dict():
                return fetch(value)
            case _:  # Colmena leaves a value of a message that is not serialized as it is
                return value

    known = {name: _convert(content[name], kind, name) for name, kind in _FIELDS.items() if content.get(name) is not None}
    nested = {name: _nested(content[name], kind, name) for name, kind in _RECORDS.items() if content.get(name) is not None}
    if "timestamp" not in nested:
        nested["timestamp"] = _nested(content.get("timestamps", {}), Timestamps, "timestamps")
    args, kwargs = _inputs(content.get("inputs"))
    result = Result((tuple(payload(value) for value in args), {name: payload(value) for name, value in kwargs.items()}), **known, **nested)
    if not _TASK_ID.fullmatch(result.task_id):
        raise CorruptObject(f"a task message has the unusable task_id {result.task_id[:80]!r}")
    result.value = payload(content.get("value"))
    return result


_FIELDS: dict[str, Any] = {
    "method": str,
    "task_id": str,
    "success": bool,
    "complete": bool,
    "task_info": dict[str, Any],
    "message_sizes": dict[str, int],
    "serialization_method": str,
    "keep_inputs": bool,
    "topic": str,
    "max_retries": int,
    "retries": int,
}
_RECORDS: dict[str, Any] = {
    "resources": ResourceRequirements,
    "failure_info": FailureInformation,
    "worker_info": WorkerInformation,
    "timestamp": Timestamps,
    "time": TimeSpans,
}


def _convert(value: Any, kind: type[T], name: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as error:
        raise CorruptObject(f"field {name!r} of a task message: {error}") from error


def _nested(value: Any, kind: type[T], name: str) -> T:
    """A record without what is not set, and without fields that are unknown here."""
    if not isinstance(value, dict):
        raise CorruptObject(f"field {name!r} of a task message is not an object")
    wanted = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return _convert({key: item for key, item in value.items() if key in wanted and item is not None}, kind, name)


def _inputs(value: Any) -> tuple[list[Any], dict[str, Any]]:
    match value:
        case [list(args), dict(kwargs)]:
            return args, kwargs
        case None:
            return [], {}
        case _:
            raise CorruptObject("field 'inputs' of a task message is not a list of positional and an object of keyword arguments")


def _placed(value: Any, place: Place) -> Any:
    return place(value) if isinstance(value, Payload) else value


def _without_nan(value: Any) -> Any:
    match value:
        case float() if value != value:
            return None
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case _:
            return value


# --- one message, one block of bytes ----------------------------------------------------------------------


def form_of(name: Any, *, allow_pickle: bool) -> Form:
    """The form in which a message says a value is. Raises :class:`CorruptObject`."""
    if name == "pickle" and not allow_pickle:
        raise CorruptObject(PICKLE_REFUSED)
    for form in ("json", "safetensors", "pickle"):
        if name == form:
            return form
    raise CorruptObject(f"a task message refers to a value of the unknown form {str(name)[:40]!r}")


def pack(result: Result) -> bytes:
    """A serialized result with its values behind it, raw."""
    bodies: list[bytes] = []

    def place(payload: Payload) -> dict[str, Any]:
        bodies.append(payload.data)
        return {"$body": len(bodies) - 1, "form": payload.form}

    return msgspec.msgpack.encode((dump(result, place), bodies))


def unpack(message: bytes, *, allow_pickle: bool) -> Result:
    """The result that :func:`pack` wrote. Raises :class:`CorruptObject`."""
    try:
        head, bodies = msgspec.msgpack.decode(message, type=tuple[bytes, list[bytes]])
    except msgspec.DecodeError as error:
        raise CorruptObject(f"a task message cannot be read: {error}") from error

    def fetch(reference: dict[str, Any]) -> Payload:
        place = reference.get("$body")
        if not isinstance(place, int) or not 0 <= place < len(bodies):
            raise CorruptObject("a task message refers to a value that it does not hold")
        return Payload(bodies[place], form_of(reference.get("form"), allow_pickle=allow_pickle))

    return load(head, fetch, allow_pickle=allow_pickle)
