"""The fuzzer finds what it is for, and nothing in the codecs of this package. ``make fuzz`` looks at many more objects."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.testing import fuzz
from gradientmail_torch.testing.codecs import Codec, codecs

CODECS = {codec.name: codec for codec in codecs()}


def test_nothing_is_found_in_the_codecs() -> None:
    report = fuzz.explore(4000, seed=random.SystemRandom().randrange(2**32))
    assert not report.findings, report.findings[0]
    assert report.verdicts.keys() == CODECS.keys()
    assert all(counts["read"] and counts["refused"] for counts in fuzz.explore(8000, seed=0).verdicts.values())


@pytest.mark.parametrize("name", CODECS)
@settings(deadline=None, max_examples=40)
@given(data=st.binary(max_size=200) | st.text(max_size=50).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_read_rightly_or_refused(name: str, data: bytes) -> None:
    fuzz.examine(CODECS[name], data)


@pytest.mark.parametrize("name", CODECS)
def test_every_specimen_is_read(name: str) -> None:
    for specimen in CODECS[name].specimens:
        assert fuzz.examine(CODECS[name], specimen) == "read"


def test_the_command_keeps_a_limit_of_memory() -> None:
    command = [sys.executable, "-m", "gradientmail_torch.testing.fuzz", "--objects", "3000", "--seed", "7"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3000 objects" in ended.stdout


def test_a_seed_gives_the_same_objects() -> None:
    for codec in CODECS.values():
        assert [fuzz.altered(codec, 5, number) for number in range(30)] == [fuzz.altered(codec, 5, number) for number in range(30)]


SPECIMEN = b'{"a": [1, 2, 3], "b": "text"}'


def broken_by(kind: str, data: bytes) -> object:
    if data == SPECIMEN:
        return data
    match kind:
        case "another error":
            raise KeyError("a")
        case "a wrong value":
            return b"something else"
        case "too much memory":
            return [bytes(1000) for _ in range(10_000)] and data
        case _:
            raise CorruptObject("refused")


@pytest.mark.parametrize("kind", ["another error", "a wrong value", "too much memory"])
def test_a_codec_that_is_broken_is_found(kind: str) -> None:
    codec = Codec(
        name="broken", form="json", specimens=(SPECIMEN,), read=lambda data: broken_by(kind, data), sound=lambda data, value: value == data
    )
    report = fuzz.explore(100, seed=0, chosen=[codec])
    assert report.findings
    assert "again with: --seed 0 --first" in report.findings[0]


def test_one_that_refuses_is_not() -> None:
    codec = Codec(name="sound", form="json", specimens=(SPECIMEN,), read=lambda data: broken_by("", data), sound=lambda data, value: True)
    assert not fuzz.explore(100, seed=0, chosen=[codec]).findings
