"""Tensors as bytes and back: safetensors in one of several number formats.

Decoding trusts nothing: the header's length, names, types and shapes must be those that the layout gives
before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from gradientmail_torch.algorithms.quantize import BLOCK, code_dtype, code_shape, dequantize, quantize
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.messages import TensorSpec

CommitWire = Literal["fp32", "bf16", "int8", "int4", "e3m0"]
Wire = Literal["fp32", "bf16", "int8", "int4", "e3m0", "sparse"]
COMMIT_WIRES, WIRES = get_args(CommitWire), get_args(Wire)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCALES = "#scales"  # a tensor's scales travel under its name and this
_SAFETENSORS_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
MAX_REASON = 300  # characters of an error's text, which may quote the object


def encode(tensors: Sequence[Tensor], specs: Sequence[TensorSpec], wire: str) -> bytes:
    """Parameters in the wire format, float buffers in fp32, other buffers as they are."""
    stored: dict[str, Tensor] = {}
    for tensor, spec in zip(tensors, specs, strict=True):
        if _is_quantized(spec, wire):
            stored[spec.name], stored[spec.name + _SCALES] = quantize(tensor, wire)
        else:
            stored[spec.name] = tensor.to(_plain_dtype(spec, wire)).contiguous()
    return save(stored)


def decode(data: bytes, specs: Sequence[TensorSpec], wire: str, *, key: str) -> list[Tensor]:
    """The tensors in layout order, floating ones as fp32. Raises :class:`CorruptObject` naming ``key``."""
    if wire not in WIRES:
        raise CorruptObject(f"{key!r} is in the unknown wire format {wire!r}")
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for spec in specs:
        if _is_quantized(spec, wire):
            shape = code_shape(spec.numel, wire)
            expected[spec.name] = (code_dtype(wire), shape)
            expected[spec.name + _SCALES] = (torch.bfloat16, shape[:1])
        else:
            expected[spec.name] = (_plain_dtype(spec, wire), spec.shape)
    _check_header(data, expected, key)
    try:
        stored = load(data)
    except SafetensorError as error:  # it is stricter than JSON is
        raise CorruptObject(f"{key!r} does not hold the tensors of its fragment: {error}") from error
    return [_decoded(stored, spec, wire) for spec in specs]


def _decoded(stored: Mapping[str, Tensor], spec: TensorSpec, wire: str) -> Tensor:
    if _is_quantized(spec, wire):
        return dequantize(stored[spec.name], stored[spec.name + _SCALES], wire, spec.shape)
    return stored[spec.name].to(torch.float32) if spec.floating else stored[spec.name]


def _is_quantized(spec: TensorSpec, wire: str) -> bool:
    """Whether a tensor travels in blocks; what would not fill one travels in bf16."""
    return wire in BLOCK and spec.kind == "parameter" and spec.numel >= BLOCK[wire]


def _plain_dtype(spec: TensorSpec, wire: str) -> torch.dtype:
    if not spec.floating:
        dtype = getattr(torch, spec.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype not in _SAFETENSORS_NAMES:
            raise CorruptObject(f"tensor {spec.name!r} has type {spec.dtype!r}, which cannot travel")
        return dtype
    return _DTYPES.get(wire, torch.bfloat16) if spec.kind == "parameter" else torch.float32


def can_travel(dtype: torch.dtype) -> bool:
    """Whether there is a format for tensors of this type; complex ones travel as pairs of real numbers."""
    return dtype.is_floating_point or dtype in _SAFETENSORS_NAMES


def limit_bytes(specs: Sequence[TensorSpec]) -> int:
    """The length that no object of these tensors exceeds in any wire format."""
    return sum(8 * spec.numel + 4 * len(spec.name.encode()) + 256 for spec in specs) + 4096


def _header_limit(names: Iterable[str]) -> int:
    """Bytes that no header of tensors of these names exceeds: JSON takes many times its length in memory."""
    return 1024 + sum(256 + 6 * len(name.encode()) for name in names)


def _check_header(data: bytes, expected: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], key: str) -> None:
    """Raises unless the header lists exactly the expected tensors, one behind the other, to the last byte."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > min(_header_limit(expected), len(data) - 8):
            raise ValueError("the header is longer than the object, or than these tensors need")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        if header.keys() != expected.keys():
            raise ValueError(f"it holds other tensors: {sorted(header.keys() ^ expected.keys())[0]!r}")
        spans = []
        for name, (dtype, shape) in expected.items():
            entry = header[name]
            if entry["dtype"] != _SAFETENSORS_NAMES[dtype] or tuple(entry["shape"]) != shape:
                raise ValueError(f"tensor {name!r} is {entry['dtype']} {entry['shape']}, not {dtype} {list(shape)}")
            spans.append(tuple(entry["data_offsets"]))
        position = 0
        for begin, end in sorted(spans):
            if begin != position or end < begin:
                raise ValueError("its tensors overlap or leave gaps")
            position = end
        if position != len(data) - 8 - length:
            raise ValueError("it is truncated or has a tail")
    except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
        raise CorruptObject(f"{key!r} does not hold the tensors of its fragment: {str(error)[:MAX_REASON]}") from error
