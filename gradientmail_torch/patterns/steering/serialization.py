"""Values as bytes: JSON, with tensors and arrays as safetensors; pickle where everyone who can write is trusted.

JSON keeps what JSON can say: tuples come back as lists, keys of dicts must be strings. Tensors, arrays and bytes
may be anywhere inside; one that is there makes the whole a safetensors file whose metadata holds the JSON.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from gradientmail_torch.errors import ConfigError, CorruptObject

Form = Literal["json", "safetensors", "pickle"]
Method = Literal["json", "pickle"]
METHODS: tuple[Method, ...] = ("json", "pickle")

_TENSOR, _ESCAPED, _SAFETENSORS = "$tensor", "$dict", "$safetensors"
_INLINE = f'{{"{_SAFETENSORS}": "'


@dataclass(frozen=True, slots=True)
class Payload:
    """One serialized value."""

    data: bytes
    form: Form

    def text(self) -> str:
        """As a string, which is how Colmena's messages hold values: JSON text, or pickle in hexadecimal."""
        match self.form:
            case "json":
                return self.data.decode()
            case "pickle":
                return self.data.hex()
            case "safetensors":
                return f'{_INLINE}{base64.b64encode(self.data).decode()}"}}'

    @classmethod
    def from_text(cls, text: str, method: Method) -> Payload:
        """Raises :class:`CorruptObject` when ``text`` is not what :meth:`text` writes."""
        try:
            if method == "pickle":
                return cls(bytes.fromhex(text), "pickle")
            if text.startswith(_INLINE):
                return cls(base64.b64decode(text[len(_INLINE) : -2], validate=True), "safetensors")
            return cls(text.encode(), "json")
        except ValueError as error:
            raise CorruptObject(f"a value that should be {method} text is not: {error}") from error


def check_method(method: str) -> Method:
    for known in METHODS:
        if method == known:
            return known
    raise ConfigError(f"serialization_method must be 'json' or 'pickle', not {method!r}")


def encode(value: object, method: Method, *, what: str = "value") -> Payload:
    """``value`` as bytes. Raises :class:`ConfigError` naming the part of ``what`` that cannot be written, and the cure."""
    if method == "pickle":
        try:
            return Payload(pickle.dumps(value, protocol=5), "pickle")
        except Exception as error:  # pickle raises whatever an object's own code raises
            raise ConfigError(f"{what} cannot be pickled: {error}") from error
    leaves: dict[str, Any] = {}
    try:
        text = json.dumps(_pack(value, leaves, what))
        return Payload(_save(leaves, text), "safetensors") if leaves else Payload(text.encode(), "json")
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply, or contains itself") from None
    except Exception as error:  # arrays of objects or text, sparse tensors, …: each library raises errors of its own
        raise ConfigError(
            f"{what} cannot be written as JSON and safetensors: {error}. Use plain values and dense numbers, or {_KNOWINGLY}"
        ) from error


def decode(payload: Payload) -> Any:
    """The value in ``payload``. The caller has seen to it that pickle may be read. Raises :class:`CorruptObject`."""
    try:
        match payload.form:
            case "pickle":
                return pickle.loads(payload.data)
            case "json":
                return _unpack(json.loads(payload.data), {})
            case "safetensors":
                text, leaves = _load(payload.data)
                return _unpack(json.loads(text), leaves)
    except Exception as error:  # foreign bytes, foreign code: any kind of error
        raise CorruptObject(
            f"a {payload.form} value of {len(payload.data)} bytes cannot be read: {type(error).__name__}: {error}"
        ) from error


def _pack(value: Any, leaves: dict[str, Any], where: str) -> Any:
    """``value`` as JSON can hold it; tensors, arrays and bytes go to ``leaves``."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_pack(item, leaves, f"{where}[{place}]") for place, item in enumerate(value)]
        case dict():
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"{where} has the key {key!r}: JSON takes strings alone. Use str keys, or {_KNOWINGLY}")
            packed = {str(key): _pack(item, leaves, f"{where}[{key!r}]") for key, item in value.items()}
            return {_ESCAPED: packed} if packed.keys() & {_TENSOR, _ESCAPED, _SAFETENSORS} else packed
    kind = _kind(value)
    if kind is None:
        scalar = getattr(value, "item", None)
        if scalar is not None and hasattr(value, "dtype"):  # a scalar of NumPy
            return _pack(scalar(), leaves, where)
        raise ConfigError(f"{where} is a {type(value).__name__}, which JSON and safetensors cannot hold. Use plain values, or {_KNOWINGLY}")
    name = str(len(leaves))
    leaves[name] = value
    return {_TENSOR: name, "kind": kind}


_KNOWINGLY = "serialization_method='pickle' where everyone who can write to the queue may run code on your machines"


def _unpack(value: Any, leaves: dict[str, Any]) -> Any:
    match value:
        case list():
            return [_unpack(item, leaves) for item in value]
        case {"$tensor": str(name), "kind": str(kind)} if len(value) == 2:
            return _RESTORE[kind](leaves[name])
        case {"$dict": dict(escaped)} if len(value) == 1:
            return {key: _unpack(item, leaves) for key, item in escaped.items()}
        case dict():
            return {key: _unpack(item, leaves) for key, item in value.items()}
        case _:
            return value


def _kind(value: object) -> str | None:
    """Which kind of leaf ``value`` is. A library that nobody has imported has made no values."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes"
    for module, name in (("torch", "Tensor"), ("numpy", "ndarray")):
        if module in sys.modules and isinstance(value, getattr(sys.modules[module], name)):
            return module
    return None


_RESTORE: dict[str, Callable[[Any], Any]] = {
    "torch": lambda leaf: leaf,
    "numpy": lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf,
    "bytes": lambda leaf: (leaf.numpy() if hasattr(leaf, "numpy") else leaf).tobytes(),
}


def _save(leaves: dict[str, Any], text: str) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    arrays = {name: np.frombuffer(leaf, np.uint8) if _kind(leaf) == "bytes" else leaf for name, leaf in leaves.items()}
    if all(isinstance(leaf, np.ndarray) for leaf in arrays.values()):
        return bytes(save({name: np.ascontiguousarray(leaf).reshape(leaf.shape) for name, leaf in arrays.items()}, {"value": text}))
    from safetensors.torch import save as save_tensors

    torch = sys.modules["torch"]
    # Copied: parts of one storage may not be saved side by side, and arrays may be read-only.
    tensors = {name: torch.from_numpy(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf for name, leaf in arrays.items()}
    return bytes(save_tensors({name: leaf.detach().cpu().contiguous().clone() for name, leaf in tensors.items()}, {"value": text}))


def _load(data: bytes) -> tuple[str, dict[str, Any]]:
    length = int.from_bytes(data[:8], "little")
    text = json.loads(data[8 : 8 + length])["__metadata__"]["value"]
    if '"kind": "torch"' in text:
        from safetensors.torch import load as load_tensors

        return text, load_tensors(data)
    from safetensors.numpy import load

    return text, load(data)
