"""Block quantisation of fp32 tensors to 8 and 4 bits, vectorised.

A block of consecutive elements shares one scale, its largest magnitude, kept as bf16. Four bits without error
feedback cost no measurable loss as long as they are summed in fp32 (arXiv 2501.18512, 2604.21428).

======== ===== ======================================================================== ===========
format   block levels of a magnitude, relative to the scale                             bits/number
======== ===== ======================================================================== ===========
``int8``   256 0, 1/127, …, 1                                                               8.06
``int4``   128 0, 1/7, …, 1                                                                 4.13
``e3m0``   128 0, 2⁻⁶, 2⁻⁵, …, 1 (one sign bit, three exponent bits, no mantissa)           4.13
======== ===== ======================================================================== ===========
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Quantized = Literal["int8", "int4", "e3m0"]

BLOCK: dict[str, int] = {"int8": 256, "int4": 128, "e3m0": 128}


def code_shape(numel: int, form: str) -> tuple[int, int]:
    """Shape of the codes of a tensor of ``numel`` elements: blocks × bytes."""
    block = BLOCK[form]
    return -(-numel // block), block if form == "int8" else block // 2


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
        case _:
            return _pack(_e3m0_codes(relative)), scales


def dequantize(codes: Tensor, scales: Tensor, form: str, shape: tuple[int, ...]) -> Tensor:
    """The fp32 tensor of ``shape`` that codes and scales stand for."""
    match form:
        case "int8":
            relative = codes.to(torch.float32).div_(127)
        case "int4":
            relative = _unpack(codes).to(torch.float32).sub_(8).div_(7)
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
