"""Wire formats of few bits: how far off they are at most, and that their objects are trusted no more than others."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradientmail_torch.algorithms.quantize import BLOCK, KEPT, code_shape, dequantize, quantize
from gradientmail_torch.algorithms.wire import decode, encode, limit_bytes
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.messages import TensorSpec

quick = settings(deadline=None, max_examples=60)
FORMS = ["int8", "int4", "e3m0"]
by_form = pytest.mark.parametrize("form", FORMS)
by_any_form = pytest.mark.parametrize("form", [*FORMS, "sparse"])
LEVELS = {"int8": [n / 127 for n in range(128)], "int4": [n / 7 for n in range(8)], "e3m0": [0.0, *(2.0**-n for n in range(7))]}


def back(tensor: Tensor, form: str) -> Tensor:
    return dequantize(*quantize(tensor, form), form, tuple(tensor.shape))


def scales_of(tensor: Tensor, form: str) -> Tensor:
    """The largest magnitude of each element's block, in bf16."""
    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % BLOCK[form])).view(-1, BLOCK[form])
    scales = flat.abs().amax(1).bfloat16().float()
    return scales.repeat_interleave(BLOCK[form])[: tensor.numel()].view(tensor.shape)


@by_form
@quick
@given(st.integers(1, 700), st.integers(0, 2**31), st.floats(-20, 8))
def test_every_element_takes_the_nearest_level_of_its_block(form: str, length: int, seed: int, magnitude: float) -> None:
    tensor = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    found, scales = back(tensor, form), scales_of(tensor, form)
    levels = torch.tensor([*LEVELS[form], *(-level for level in LEVELS[form])])
    nearest = (levels[None, :] * scales[:, None] - tensor[:, None]).abs().amin(1)
    assert ((found - tensor).abs() <= nearest + 1e-5 * scales).all()


@quick
@given(st.integers(0, 2**31), st.floats(-20, 8))
def test_sparse_keeps_the_largest_of_a_block_by_one_of_two_levels(seed: int, magnitude: float) -> None:
    tensor = torch.randn(2, 4096, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    found = back(tensor, "sparse")
    for row, kept, scale in zip(tensor, found, scales_of(tensor, "sparse")[:, 0], strict=True):
        assert set(row.abs().topk(KEPT).indices.tolist()) == set(kept.nonzero().flatten().tolist())
        chosen = kept != 0
        assert torch.equal(kept[chosen].sign(), row[chosen].sign())
        nearest = torch.where(row[chosen].abs() > scale * 5 / 6, scale, scale * 2 / 3)
        assert torch.allclose(kept[chosen].abs(), nearest, rtol=1e-5)


@pytest.mark.parametrize("places", [[], [5], [5, 4999], [*range(10)], [4096, 4999]])
def test_sparse_adds_nothing_where_fewer_have_changed(places: list[int]) -> None:
    tensor = torch.zeros(5000)
    tensor[places] = -3.0
    assert torch.equal(back(tensor, "sparse"), tensor)


def test_what_sparse_leaves_out_comes_through_when_it_is_offered_again() -> None:
    """Error feedback: the same progress each time, and what was left out of it added to the next."""
    progress = torch.randn(8192, generator=torch.Generator().manual_seed(1))
    left, sent = torch.zeros_like(progress), torch.zeros_like(progress)
    for _ in range(400):
        offered = progress + left
        passed = back(offered, "sparse")
        left, sent = offered - passed, sent + passed
    assert (sent / 400 - progress).norm() < 0.2 * progress.norm()


@by_form
def test_zeros_stay_zeros_and_the_largest_of_a_block_stays_it(form: str) -> None:
    assert not back(torch.zeros(300), form).any()
    tensor = torch.zeros(600)
    tensor[5], tensor[599] = 2.0, -4.0
    assert torch.equal(back(tensor, form), tensor)


@by_any_form
def test_what_was_sent_once_is_sent_unchanged_again(form: str) -> None:
    """A contribution that is uploaded a second time is the same one."""
    once = back(torch.randn(9777, generator=torch.Generator().manual_seed(3)), form)
    assert torch.equal(back(once, form), once)


@by_any_form
@pytest.mark.parametrize("shape", [(1000,), (3, 5, 70), (128,), (256,), (257,), (2, 64), (3, 4096), (5000,)])
def test_shapes_pass_and_the_bytes_are_what_the_format_says(form: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    specs = [TensorSpec(name="w", shape=shape, dtype="float32")]
    data = encode([tensor], specs, form)
    assert len(data) <= limit_bytes(specs)
    (found,) = decode(data, specs, form, key="k")
    assert found.shape == shape
    assert found.dtype == torch.float32
    if tensor.numel() >= BLOCK[form]:
        blocks, row = code_shape(tensor.numel(), form)
        assert len(data) < blocks * row + 2 * blocks + 250
        assert torch.equal(found, back(tensor, form))
    else:
        assert torch.equal(found, tensor.bfloat16().float()), "what fills no block travels in bf16"


@by_any_form
def test_buffers_are_not_quantised(form: str) -> None:
    specs = [
        TensorSpec(name="mean", shape=(300,), dtype="float32", kind="buffer"),
        TensorSpec(name="count", shape=(300,), dtype="int64", kind="buffer"),
    ]
    values = [torch.randn(300), torch.arange(300)]
    found = decode(encode(values, specs, form), specs, form, key="k")
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))


@by_any_form
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31))
def test_mutated_objects_are_refused_or_of_the_layouts_form(form: str, seed: int) -> None:
    rng = random.Random(seed)
    specs = [TensorSpec(name="w", shape=(3, 1400), dtype="float32"), TensorSpec(name="b", shape=(2,), dtype="float32")]
    good = encode([torch.randn(3, 1400), torch.randn(2)], specs, form)
    for _ in range(30):
        data = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(8, len(data) if rng.random() < 0.3 else 220)
            data[place : place + 1] = rng.choice([bytes([rng.randrange(256)]), b"", b"0", b"9", b'"', b"]", b"-"])
        try:
            found = decode(bytes(data), specs, form, key="k")
        except CorruptObject:
            continue
        assert [(t.dtype, tuple(t.shape)) for t in found] == [(torch.float32, (3, 1400)), (torch.float32, (2,))]


@by_any_form
def test_one_format_is_not_taken_for_another(form: str) -> None:
    specs = [TensorSpec(name="w", shape=(6000,), dtype="float32")]
    data = encode([torch.randn(6000)], specs, form)
    for other in {*FORMS, "sparse", "fp32", "bf16"} - {form} - ({"int4", "e3m0"} if form in ("int4", "e3m0") else set()):
        with pytest.raises(CorruptObject):
            decode(data, specs, other, key="k")
