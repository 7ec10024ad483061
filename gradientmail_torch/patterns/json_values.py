"""JSON values, strictly: what is read is what was written, or it is refused before anything is recorded."""

from __future__ import annotations

import json
import math

from gradientmail_torch.errors import ConfigError, CorruptObject

_CURE = "use None, bool, int, float, str, lists and dicts with str keys"


def to_json(value: object, *, what: str, finite: bool = True) -> bytes:
    """``value`` as JSON with sorted keys, so that equal values give equal bytes; tuples become lists.

    Raises :class:`ConfigError` that names ``what`` and the place in it, for what JSON cannot hold or would change
    without a word, such as keys that are no strings and objects of other types. ``finite=False`` lets NaN and
    infinities through, as Python writes them and :func:`from_json` reads them.
    """
    try:
        _check(value, what, finite)
        return json.dumps(value, allow_nan=not finite, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    except (RecursionError, ValueError) as error:  # half a surrogate pair, a number of more digits than Python writes
        raise ConfigError(f"{what} cannot be written as JSON: {error}") from error


def from_json(data: bytes, *, what: str, finite: bool = True) -> object:
    """Raises :class:`CorruptObject` that names ``what``."""
    try:
        return json.loads(data, parse_constant=_refuse, parse_float=_finite) if finite else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptObject(f"{what} is not JSON: {error}") from error


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _check(value: object, where: str, finite: bool) -> None:
    match value:
        case None | bool() | int() | str():
            return
        case float():
            if finite and not math.isfinite(value):
                raise ConfigError(f"{where} is {value}, which JSON cannot hold: {_CURE}, and finite numbers")
        case list() | tuple():
            for place, member in enumerate(value):
                _check(member, f"{where}[{place}]", finite)
        case dict():
            for key, member in value.items():
                if not isinstance(key, str):
                    raise ConfigError(f"{where} has the key {key!r}, which JSON would turn into text: {_CURE}")
                _check(member, f"{where}[{key!r}]", finite)
        case _:
            raise ConfigError(f"{where} is a {type(value).__name__}, which JSON cannot hold: {_CURE}")
