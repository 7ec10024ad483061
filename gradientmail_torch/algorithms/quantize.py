"""Block quantisation of fp32 tensors to 8 and 4 bits, and to few elements of 2 bits, vectorised.

A block of consecutive elements shares one scale, its largest magnitude, kept as bf16. Four bits without error
feedback cost no measurable loss as long as they are summed in fp32 (arXiv 2501.18512, 2604.21428).

``sparse`` keeps the 64 largest of 4,096 and sends their places in 12 bits each (the blocks of SparseLoCo, arXiv
2508.15706). It lives by error feedback: what is left out must be offered again with the next contribution.

========== ===== ======================================================================== ===========
format     block levels of a magnitude, relative to the scale                             bits/number
========== ===== ======================================================================== ===========
``int8``     256 0, 1/127, …, 1                                                               8.06
``int4``     128 0, 1/7, …, 1                                                                 4.13
``e3m0``     128 0, 2⁻⁶, 2⁻⁵, …, 1 (one sign bit, three exponent bits, no mantissa)           4.13
``sparse``  4096 2/3, 1 for the 64 largest, 0 for all others                                  0.22
========== ===== ======================================================================== ===========
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Quantized = Literal["int8", "int4", "e3m0", "sparse"]

BLOCK: dict[str, int] = {"int8": 256, "int4": 128, "e3m0": 128, "sparse": 4096}
KEPT = 64
"""Elements of a block that ``sparse`` keeps."""


def code_shape(numel: int, form: str) -> tuple[int, int]:
    """Shape of the codes of a tensor of ``numel`` elements: blocks × bytes."""
    block = BLOCK[form]
    return -(-numel // block), {"int8": block, "sparse": KEPT * (12 + 2) // 8}.get(form, block // 2)


def code_dtype(form: str) -> torch.dtype:
    return torch.int8 if form == "int8" else torch.uint8


def quantize(tensor: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Codes of :func:`code_shape` and one bf16 scale for each block."""
    blocks = _blocks(tensor, BLOCK[form])
    scales = blocks.abs().amax(dim=1).to(torch.bfloat16)
    # By the rounded scale, so that rounding it costs nothing; all zeros stay zeros.
    relative = blocks / scales.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    relative.clamp_(-1, 1)
    match form:
        case "int8":
            return relative.mul_(127).round_().to(torch.int8), scales
        case "int4":
            return _pack(relative.mul_(7).round_().add_(8).to(torch.uint8)), scales
        case "sparse":
            return _sparse_codes(relative), scales
        case _:
            return _pack(_e3m0_codes(relative)), scales


def dequantize(codes: Tensor, scales: Tensor, form: str, shape: tuple[int, ...]) -> Tensor:
    """The fp32 tensor of ``shape`` that codes and scales stand for."""
    match form:
        case "int8":
            relative = codes.to(torch.float32).div_(127)
        case "int4":
            relative = _unpack(codes).to(torch.float32).sub_(8).div_(7)
        case "sparse":
            relative = _from_sparse(codes)
        case _:
            relative = _E3M0_LEVELS[_unpack(codes).int()]
    numel = 1
    for extent in shape:
        numel *= extent
    return relative.mul_(scales.float().unsqueeze(1)).flatten()[:numel].reshape(shape)


def _blocks(tensor: Tensor, block: int) -> Tensor:
    flat = tensor.detach().to(torch.float32).flatten()
    rest = -len(flat) % block
    return (torch.nn.functional.pad(flat, (0, rest)) if rest else flat).view(-1, block)


def _pack(nibbles: Tensor) -> Tensor:
    """Two codes of four bits to a byte, the first in the low half."""
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


# Code 0 is zero, 1 … 7 are 2⁻⁶ … 1, and 8 more is the negative.
_E3M0_MAGNITUDES = torch.tensor([0.0, *(2.0**e for e in range(-6, 1))])
_E3M0_LEVELS = torch.cat((_E3M0_MAGNITUDES, -_E3M0_MAGNITUDES))
_E3M0_BOUNDS = (_E3M0_MAGNITUDES[1:] + _E3M0_MAGNITUDES[:-1]) / 2


def _e3m0_codes(relative: Tensor) -> Tensor:
    nearest = torch.bucketize(relative.abs(), _E3M0_BOUNDS, out_int32=True)
    return (nearest + 8 * (relative < 0)).to(torch.uint8)


# Bit 0 of a code says which level, bit 1 is the sign.
_SPARSE_LEVELS = torch.tensor([2 / 3, 1.0, -2 / 3, -1.0])
_SPARSE_BOUND = 5 / 6
_QUARTERS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)  # where in a byte the codes stand


def _sparse_codes(relative: Tensor) -> Tensor:
    """The places of the elements kept, two in three bytes, then their codes, four in one byte."""
    places = relative.abs().topk(KEPT, dim=1).indices
    values = relative.gather(1, places)
    # There is no code for zero: where a block has fewer than so many others, the largest is sent again instead.
    places = torch.where(values == 0, places[:, :1], places).to(torch.int16)
    values = torch.where(values == 0, values[:, :1], values)
    codes = ((values.abs() > _SPARSE_BOUND) + 2 * (values < 0)).to(torch.uint8).view(-1, KEPT // 4, 4)
    first, second = places[:, 0::2], places[:, 1::2]
    triples = torch.stack((first & 255, (first >> 8) | ((second & 15) << 4), second >> 4), dim=2)
    return torch.cat((triples.to(torch.uint8).flatten(1), (codes << _QUARTERS).sum(2, dtype=torch.uint8)), dim=1)


def _from_sparse(codes: Tensor) -> Tensor:
    width = KEPT * 12 // 8
    triples = codes[:, :width].to(torch.int64).view(len(codes), -1, 3)
    first = triples[:, :, 0] | ((triples[:, :, 1] & 15) << 8)
    second = (triples[:, :, 1] >> 4) | (triples[:, :, 2] << 4)
    places = torch.stack((first, second), dim=2).flatten(1)
    levels = (codes[:, width:].unsqueeze(2) >> _QUARTERS) & 3
    relative = torch.zeros(len(codes), BLOCK["sparse"])
    return relative.scatter_(1, places, _SPARSE_LEVELS[levels.flatten(1).int()])
