"""Tensors as bytes: round trips, and that nothing but the expected bytes is taken."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradientmail_torch.algorithms.wire import decode, encode, limit_bytes
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import DataRef, TensorSpec, read_data, reference

SPECS = [
    TensorSpec(name="layer.weight", shape=(3, 2), dtype="float32"),
    TensorSpec(name="scale", shape=(), dtype="bfloat16"),
    TensorSpec(name="empty", shape=(0, 4), dtype="float32"),
    TensorSpec(name="norm.mean", shape=(4,), dtype="float32", kind="buffer"),
    TensorSpec(name="norm.batches", shape=(), dtype="int64", kind="buffer"),
    TensorSpec(name="mask", shape=(5,), dtype="bool", kind="buffer"),
]


def tensors(seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, 2, generator=rng),
        torch.randn((), generator=rng),
        torch.empty(0, 4),
        torch.randn(4, generator=rng),
        torch.tensor(2**40 + 1),
        torch.tensor([True, False, True, True, False]),
    ]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- round trips -------------------------------------------------------------------------------------


def test_fp32_passes_unchanged_to_the_last_bit() -> None:
    assert equal(decode(encode(tensors(), SPECS, "fp32"), SPECS, "fp32", key="k"), tensors())


def test_bf16_rounds_parameters_alone() -> None:
    found = decode(encode(tensors(), SPECS, "bf16"), SPECS, "bf16", key="k")
    expected = [t.bfloat16().float() if spec.kind == "parameter" else t for t, spec in zip(tensors(), SPECS, strict=True)]
    assert equal(found, expected)
    assert equal(decode(encode(found, SPECS, "bf16"), SPECS, "bf16", key="k"), found)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 4), max_size=3)), max_size=5, unique_by=lambda t: t[0]),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(0, 2**31),
)
def test_any_shapes_and_names_pass(layout: list[tuple[str, list[int]]], wire: str, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    layout = [(name, shape) for name, shape in layout if name != "__metadata__" and name.isprintable()]
    specs = [TensorSpec(name=name, shape=tuple(shape), dtype="float32") for name, shape in layout]
    values = [torch.randn(shape, generator=rng) for _, shape in layout]
    data = encode(values, specs, wire)
    assert len(data) <= limit_bytes(specs)
    found = decode(data, specs, wire, key="k")
    expected = values if wire == "fp32" else [value.bfloat16().float() for value in values]
    assert equal(found, expected)


def test_views_of_one_storage_and_strided_tensors_can_be_sent() -> None:
    base = torch.arange(12.0)
    specs = [TensorSpec(name="a", shape=(2, 3), dtype="float32"), TensorSpec(name="b", shape=(3, 2), dtype="float32")]
    values = [base[:6].view(2, 3), base[6:].view(2, 3).T]
    assert equal(decode(encode(values, specs, "fp32"), specs, "fp32", key="k"), [v.contiguous() for v in values])


def test_what_was_decoded_can_be_sent_again() -> None:
    once = decode(encode(tensors(), SPECS, "fp32"), SPECS, "fp32", key="k")
    assert equal(decode(encode(once, SPECS, "fp32"), SPECS, "fp32", key="k"), tensors())


@pytest.mark.parametrize("dtype", ["uint16", "load", "no_such_type"])
def test_a_type_that_cannot_travel_is_named(dtype: str) -> None:
    specs = [TensorSpec(name="x", shape=(), dtype=dtype)]
    with pytest.raises(CorruptObject, match=f"'x' has type '{dtype}'"):
        encode([torch.zeros(())], specs, "fp32")
    with pytest.raises(CorruptObject, match=f"'x' has type '{dtype}'"):
        decode(GOOD, specs, "fp32", key="k")


# --- corruption --------------------------------------------------------------------------------------

GOOD = encode(tensors(), SPECS, "fp32")
HEADER_BYTES = struct.unpack_from("<Q", GOOD)[0]
HEADER = json.loads(GOOD[8 : 8 + HEADER_BYTES])
BODY = GOOD[8 + HEADER_BYTES :]


def packed(header: object, body: bytes = BODY) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def with_entry(name: str, **changes: object) -> bytes:
    return packed(HEADER | {name: HEADER[name] | changes})


def swapped_offsets() -> bytes:
    a, b = HEADER["layer.weight"], HEADER["norm.mean"]
    return packed(HEADER | {"layer.weight": a | {"data_offsets": b["data_offsets"]}, "norm.mean": b | {"data_offsets": a["data_offsets"]}})


CORRUPTIONS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "seven bytes": lambda: GOOD[:7],
    "a header alone": lambda: GOOD[: 8 + HEADER_BYTES],
    "one byte short": lambda: GOOD[:-1],
    "one byte more": lambda: GOOD + b"\0",
    "a header longer than the object": lambda: struct.pack("<Q", len(GOOD)) + GOOD[8:],
    "a header of 2^64 - 1 bytes": lambda: struct.pack("<Q", 2**64 - 1) + GOOD[8:],
    "no header": lambda: struct.pack("<Q", 0) + GOOD[8:],
    "a header that is no JSON": lambda: packed(b"{" * 20),
    "a header that is no UTF-8": lambda: packed(b'{"\xff\xfe": 1}'),
    "a header that is a list": lambda: packed([1, 2]),
    "a header that is a number": lambda: packed(b"7"),
    "a header that is null": lambda: packed(b"null"),
    "a header nested too deeply": lambda: packed(b'{"a":' * 50_000),
    "metadata of another form": lambda: packed(HEADER | {"__metadata__": [1]}),
    "a tensor too few": lambda: packed({name: entry for name, entry in HEADER.items() if name != "mask"}),
    "a tensor too many": lambda: packed(HEADER | {"more": {"dtype": "F32", "shape": [0], "data_offsets": [len(BODY), len(BODY)]}}),
    "another name": lambda: packed({("MASK" if name == "mask" else name): entry for name, entry in HEADER.items()}),
    "the other wire format": lambda: encode(tensors(), SPECS, "bf16"),
    "another type of the same size": lambda: with_entry("layer.weight", dtype="I32"),
    "an unknown type": lambda: with_entry("layer.weight", dtype="F7"),
    "a type that is no name": lambda: with_entry("layer.weight", dtype=["F32"]),
    "another shape of the same size": lambda: with_entry("layer.weight", shape=[2, 3]),
    "a shape with fractions": lambda: with_entry("layer.weight", shape=[3.0, 2]),
    "a shape of truths": lambda: with_entry("norm.mean", shape=[4], data_offsets=[True, False]),
    "a shape that is no list": lambda: with_entry("layer.weight", shape=6),
    "no shape": lambda: packed(HEADER | {"mask": {"dtype": "BOOL", "data_offsets": HEADER["mask"]["data_offsets"]}}),
    "offsets that overlap": lambda: with_entry("layer.weight", data_offsets=HEADER["norm.mean"]["data_offsets"]),
    "offsets before the beginning": lambda: with_entry("layer.weight", data_offsets=[-24, 0]),
    "offsets behind the end": lambda: with_entry("layer.weight", data_offsets=[len(BODY), len(BODY) + 24]),
    "offsets that do not fit the shape": swapped_offsets,
    "offsets with fractions": lambda: with_entry("layer.weight", data_offsets=[float(o) for o in HEADER["layer.weight"]["data_offsets"]]),
    "offsets that are text": lambda: with_entry("layer.weight", data_offsets=["0", "24"]),
    "three offsets": lambda: with_entry("layer.weight", data_offsets=[0, 12, 24]),
    "an entry that is a number": lambda: packed(HEADER | {"mask": 1}),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corruption_is_a_corrupt_object_that_names_its_key(corruption: str) -> None:
    with pytest.raises(CorruptObject, match="data/0000/it") as caught:
        decode(CORRUPTIONS[corruption](), SPECS, "fp32", key="data/0000/it")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "oddity",
    [
        lambda: packed(json.dumps(HEADER)[:-1].encode() + b"," + json.dumps(HEADER)[1:].encode()),  # each name given twice
        lambda: packed(b"  " + json.dumps(HEADER).encode()),  # blanks first
        lambda: GOOD[:-1] + b"\x07",  # a bool that is neither
    ],
)
def test_an_oddity_that_is_let_through_is_of_the_layouts_form(oddity: Callable[[], bytes]) -> None:
    try:
        found = decode(oddity(), SPECS, "fp32", key="k")
    except CorruptObject:
        return
    assert equal_in_form(found)


def equal_in_form(found: list[Tensor]) -> bool:
    return [(t.dtype, tuple(t.shape)) for t in found] == [(t.dtype, tuple(t.shape)) for t in tensors()]


def test_an_unknown_wire_format_is_corrupt() -> None:
    for wire in ("int3", "", "FP32", "__class__"):
        with pytest.raises(CorruptObject, match="wire format"):
            decode(GOOD, SPECS, wire, key="k")


def test_a_huge_name_does_not_make_a_huge_error() -> None:
    with pytest.raises(CorruptObject) as caught:
        decode(packed(HEADER | {"x" * 100_000: 1}), SPECS, "fp32", key="k")
    assert len(str(caught.value)) < 1000


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31))
def test_mutated_objects_are_refused_or_of_the_layouts_form(seed: int) -> None:
    """A hundred mutations each: bytes changed, removed, doubled and put elsewhere, mostly in the header."""
    rng = random.Random(seed)
    for _ in range(100):
        data = bytearray(GOOD)
        for _ in range(rng.randint(1, 3)):
            end = 8 + HEADER_BYTES if rng.random() < 0.85 else len(data)
            place = rng.randrange(0 if rng.random() < 0.2 else 8, end)
            match rng.randrange(5):
                case 0:
                    data[place : place + 1] = bytes([rng.randrange(256)])
                case 1:
                    data[place : place + 1] = rng.choice([b"0", b"9", b"-", b"e", b".", b'"', b"[", b"}", b",", b" ", b"null", b"1e9"])
                case 2:
                    del data[place : place + rng.randint(1, 8)]
                case 3:
                    data[place:place] = data[place : place + rng.randint(1, 30)]
                case 4:
                    start = rng.randrange(8, end)
                    data[place : place + 4] = data[start : start + 4]
        if rng.random() < 0.7:  # a length that fits again, so that the header is read
            end = bytes(data).find(b"}}", 8)
            data[:8] = struct.pack("<Q", max(0, end + 2 - 8)) if end > 0 else data[:8]
        try:
            found = decode(bytes(data), SPECS, "fp32", key="k")
        except CorruptObject:
            continue
        assert equal_in_form(found)


JSON_VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    24,
    1.5,
    3.0,
    1e99,
    2**70,
    "",
    "F32",
    "BF16",
    [],
    {},
    [0, 0],
    [3, 2],
    [2, 3],
    [0, 24],
    [[0]],
    {"a": 1},
]


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_headers_of_any_other_form_are_refused(data: st.DataObject) -> None:
    """The header is sound JSON whose length fits; one to three of its values are not what they were."""
    header = json.loads(json.dumps(HEADER))
    for _ in range(data.draw(st.integers(1, 3))):
        entry = header.get(data.draw(st.sampled_from(sorted(HEADER))))
        value = copy.deepcopy(data.draw(st.sampled_from(JSON_VALUES)))
        if not isinstance(entry, dict) or data.draw(st.integers(0, 9)) == 0:
            header[data.draw(st.sampled_from(["__metadata__", "mask", "x"]))] = value
            continue
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        if isinstance(entry.get(field), list) and entry[field] and data.draw(st.booleans()):
            entry[field][data.draw(st.integers(0, len(entry[field]) - 1))] = value
        else:
            entry[field] = value
    try:
        found = decode(packed(header), SPECS, "fp32", key="k")
    except CorruptObject:
        return
    assert equal(found, tensors()), "the form is the layout's, so the body decides"


# --- bounds ------------------------------------------------------------------------------------------


def test_the_limit_holds_every_wire_format_and_little_more() -> None:
    specs = [TensorSpec(name=f"blocks.{i}.weight", shape=(100, 100), dtype="float32") for i in range(20)]
    values = [torch.zeros(100, 100) for _ in specs]
    for wire in ("fp32", "bf16"):
        assert len(encode(values, specs, wire)) <= limit_bytes(specs)
    assert limit_bytes(specs) <= 2.1 * len(encode(values, specs, "fp32"))


class _Spy(MemoryMailbox):
    """Notes how much is asked for."""

    asked: list[int | None]

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        self.asked = [*getattr(self, "asked", []), length]
        return super().get(key, start=start, length=length)


def test_no_more_is_read_than_the_record_says_nor_than_the_layout_allows() -> None:
    box = _Spy()
    box.put("k", GOOD + bytes(100_000))
    ref = reference("k", GOOD, wire="fp32")
    with pytest.raises(CorruptObject, match="length or digest"):
        read_data(box, ref, limit_bytes=limit_bytes(SPECS))
    assert box.asked == [len(GOOD) + 1]
    box.asked = []
    lying = DataRef(key="k", size=1 << 40, sha256=ref.sha256)
    with pytest.raises(CorruptObject, match=str(1 << 40)):
        read_data(box, lying, limit_bytes=limit_bytes(SPECS))
    assert box.asked == []


def test_data_of_another_digest_or_length_is_refused_and_missing_data_is_none() -> None:
    box = MemoryMailbox()
    ref = reference("k", GOOD, wire="fp32")
    assert read_data(box, ref, limit_bytes=1 << 20) is None
    for wrong in (GOOD[:-1], GOOD[:-1] + b"\x01", GOOD + b"\0", b""):
        box.put("k", wrong)
        with pytest.raises(CorruptObject, match="length or digest"):
            read_data(box, ref, limit_bytes=1 << 20)
    box.put("k", GOOD)
    assert read_data(box, ref, limit_bytes=1 << 20) == GOOD
