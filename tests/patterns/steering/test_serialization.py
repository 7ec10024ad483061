"""Values survive the way; what cannot be written is refused with the place and the cure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from gradientmail_torch.errors import ConfigError, CorruptObject
from gradientmail_torch.patterns.steering.serialization import Payload, decode, encode


@pytest.mark.parametrize("method", ["json", "pickle"])
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -2.5,
        "text",
        "",
        [],
        [1, [2, {}]],
        {"a": {"b": [None]}},
        {"$tensor": "x", "kind": "torch"},
        {"$dict": 1},
        {"$safetensors": "x"},
    ],
    ids=repr,
)
def test_plain_values_come_back_as_they_were(value: Any, method: Any) -> None:
    payload = encode(value, method)
    assert decode(payload) == value
    assert decode(Payload.from_text(payload.text(), method)) == value


def test_not_a_number_and_infinity_come_back() -> None:
    assert math.isnan(decode(encode(math.nan, "json")))
    assert decode(encode([math.inf, -math.inf], "json")) == [math.inf, -math.inf]


def test_as_in_json_a_tuple_comes_back_as_a_list() -> None:
    assert decode(encode((1, (2,)), "json")) == [1, [2]]


@pytest.mark.parametrize(
    "leaf",
    [
        torch.arange(6).reshape(2, 3),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor([True, False]),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(2.5),
        np.arange(12.0).reshape(3, 4)[:, ::2],
        b"bytes \x00\xff",
        b"",
    ],
    ids=lambda leaf: f"{type(leaf).__name__}-{getattr(leaf, 'dtype', '')}",
)
def test_tensors_arrays_and_bytes_come_back_without_pickle(leaf: Any) -> None:
    payload = encode({"x": [leaf, 1]}, "json")
    assert payload.form == "safetensors"
    (found, one) = decode(payload)["x"]
    assert one == 1
    assert type(found) is type(leaf)
    if isinstance(leaf, bytes):
        assert found == leaf
    else:
        assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape)
        assert (found == leaf).all()


def test_tensors_arrays_and_bytes_go_together_and_may_share_memory() -> None:
    whole = torch.arange(4.0, requires_grad=True)
    found = decode(encode([whole, whole[:2], np.ones(2), b"x"], "json"))
    assert torch.equal(found[0], whole)
    assert torch.equal(found[1], whole[:2])
    assert isinstance(found[2], np.ndarray)
    assert found[3] == b"x"


def test_scalars_of_numpy_are_numbers() -> None:
    assert decode(encode({"loss": np.float32(0.5), "n": np.int64(3), "ok": np.bool_(True)}, "json")) == {"loss": 0.5, "n": 3, "ok": True}


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({1: 2}, "has the key 1"),
        ([0, {"a": {3}}], r"value\[1\]\['a'\] is a set"),
        (object(), "value is a object"),
        ({"f": len}, r"value\['f'\]"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place_and_the_cure(value: Any, place: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}.*serialization_method='pickle'"):
        encode(value, "json")


@pytest.mark.parametrize(
    "value",
    [np.array(["text"]), np.array([{}], dtype=object), np.array(["2020-01-01"], dtype="datetime64[D]"), torch.eye(2).to_sparse(), 10**5000],
    ids=lambda value: str(getattr(value, "dtype", "int")),
)
def test_what_a_library_cannot_write_is_refused_with_the_cure(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"the result cannot be written.*serialization_method='pickle'"):
        encode([value], "json", what="the result")


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be pickled"):
        encode(lambda: 0, "pickle")


@pytest.mark.parametrize("value", [{"a": [1, "é"]}, torch.arange(3), b"\x00"], ids=["json", "tensor", "bytes"])
def test_a_payload_is_the_same_as_text(value: Any) -> None:
    payload = encode(value, "json")
    assert Payload.from_text(payload.text(), "json") == payload


def test_the_text_of_a_pickle_is_the_hexadecimal_that_colmena_writes() -> None:
    from colmena.models import SerializationMethod

    payload = encode({"a": 1}, "pickle")
    assert SerializationMethod.deserialize("pickle", payload.text()) == {"a": 1}
    assert decode(Payload.from_text(SerializationMethod.serialize("pickle", [1]), "pickle")) == [1]
    assert decode(Payload.from_text(SerializationMethod.serialize("json", [1, "x"]), "json")) == [1, "x"]


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (b"{", "json"),
        (b"", "json"),
        (b"\x80", "pickle"),
        (b"", "safetensors"),
        (b"\xff" * 40, "safetensors"),
        (b'{"$tensor": "0", "kind": "torch"}', "json"),
    ],
)
def test_damaged_bytes_are_a_corrupt_object(data: bytes, form: Any) -> None:
    with pytest.raises(CorruptObject):
        decode(Payload(data, form))


def test_text_that_is_not_what_it_should_be_is_a_corrupt_object() -> None:
    with pytest.raises(CorruptObject):
        Payload.from_text("not hexadecimal", "pickle")
    with pytest.raises(CorruptObject):
        Payload.from_text('{"$safetensors": "%%%"}', "json")
