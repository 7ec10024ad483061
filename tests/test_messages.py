"""The records of a run: round trips, strict decoding, and nothing but CorruptObject for what is not one."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_torch import messages
from gradientmail_torch.errors import CorruptObject, RunMismatch
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import (
    PROTOCOL,
    Beat,
    Claim,
    Commit,
    Contribution,
    DataRef,
    LeftOut,
    LifeRecord,
    Manifest,
    Merged,
    Partial,
    Record,
    TensorSpec,
    check_manifest,
    decode,
    encode,
    read,
)

NONCE = "0123456789abcdef"
REF = DataRef(key="data/0000/0000000001/a-1", size=12, sha256="ab" * 32)
CONTRIBUTION = Contribution(nonce=NONCE, learner_id="a", generation=1, steps=20, samples=640, norms=(0.5, 0.0), anchor="init", data=REF)
RECORDS: list[Record] = [
    REF,
    CONTRIBUTION,
    Claim(nonce=NONCE, learner_id="a", generation=1),
    Beat(count=3, state="training", steps=4, samples=8, seconds_per_step=0.5, uplink=1e6, versions=(1, 2), at=1.5),
    LifeRecord(nonce=NONCE, host="h", machine="m", pid=7, started_at=1.0),
    Manifest(
        protocol=PROTOCOL,
        nonce=NONCE,
        founder="a",
        founded_at=1.0,
        layout=((TensorSpec(name="w", shape=(2, 3), dtype="float32", embedding=True),),),
        initial=(REF,),
        algorithm={"name": "DecoupledDiLoCo", "outer.lr": 1.0, "quorum": 1, "buffers": True},
    ),
    Commit(
        nonce=NONCE,
        fragment=0,
        version=4,
        by="a",
        generation=2,
        parameters=REF,
        outer=REF,
        method="rda",
        merged=(Merged(nonce=NONCE, learner_id="a", generation=1, steps=1, samples=2, weight=4.0, data=REF, clips={3: 0.5}),),
        left_out=(LeftOut(nonce="", learner_id="b", reason="it is not finite"),),
    ),
    Partial(
        nonce=NONCE,
        fragment=0,
        version=4,
        group=1,
        by="a",
        generation=2,
        method="rda",
        merged=(Merged(nonce=NONCE, learner_id="a", generation=1, steps=1, samples=2, weight=4.0, data=REF),),
        radii=(0.5, 0.0),
        data=REF,
    ),
]
by_kind = pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)


@by_kind
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert decode(type(record), encode(record), key="k") == record


@by_kind
def test_a_record_is_found_by_its_key_and_a_missing_one_is_none(record: Record, mailbox: MemoryMailbox) -> None:
    assert read(mailbox, type(record), "k") is None
    mailbox.put("k", encode(record))
    assert read(mailbox, type(record), "k") == record


@by_kind
def test_fields_of_a_later_version_are_ignored(record: Record) -> None:
    later = json.loads(encode(record)) | {"from_the_future": [1, {"a": None}]}
    assert decode(type(record), json.dumps(later).encode(), key="k") == record


@by_kind
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31))
def test_what_is_not_a_record_is_corrupt_and_names_the_key(record: Record, seed: int) -> None:
    """Bytes are changed, cut and doubled; what is let through is a record that can be written again."""
    rng = random.Random(seed)
    for _ in range(20):
        data = bytearray(encode(record))
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[place : place + 1] = bytes([rng.randrange(256)])
                case 1:
                    data[place : place + 1] = rng.choice([b"0", b"-", b"9" * 30, b"e9", b'"', b"[", b"}", b"null", b"1e999", b"\\ud800"])
                case 2:
                    del data[place : place + rng.randint(1, 8)]
                case 3:
                    data[place:place] = data[place : place + rng.randint(1, 30)]
        try:
            found = decode(type(record), bytes(data), key="the/key")
        except CorruptObject as error:
            text = str(error)
        else:
            text = "the/key"
            assert decode(type(record), encode(found), key="k") == found
        assert "the/key" in text


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"[]", b"\xff\xfe", b'{"a":' * 100_000, b"1e999"])
def test_other_objects_are_corrupt(data: bytes) -> None:
    for record in RECORDS:
        with pytest.raises(CorruptObject, match="'k' is not a"):
            decode(type(record), data, key="k")


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("steps", bad) for bad in (0, -1, 1.5, "20", None, 10**30)),
        *(("samples", bad) for bad in (0, -1, 10**30)),
        *(("norms", bad) for bad in ([-1.0], [None], ["x"], 1.0)),
        *(("nonce", bad) for bad in ("", "../../x", "0123456G", "a" * 65, 5)),
        *(("learner_id", bad) for bad in ("", 5, "x" * 2000)),
        *(("generation", bad) for bad in (-1, "1")),
        *(("data", bad) for bad in (None, {}, {"key": "k", "size": -1, "sha256": "ab" * 32}, {"key": "k", "size": 1, "sha256": "zz"})),
    ],
    ids=str,
)
def test_a_contribution_with_a_senseless_field_is_corrupt(field: str, bad: object) -> None:
    changed = json.loads(encode(CONTRIBUTION)) | {field: bad}
    with pytest.raises(CorruptObject, match=rf"\$\.{field}"):
        decode(Contribution, json.dumps(changed).encode(), key="k")


def test_a_state_that_nobody_knows_is_corrupt() -> None:
    with pytest.raises(CorruptObject, match="state"):
        decode(Beat, b'{"count":1,"state":"dancing"}', key="k")


def test_whatever_is_admitted_as_a_contribution_can_be_committed() -> None:
    """A commit that could be written and not read would end the run."""
    for steps, samples in ((1, 1), (1, messages.MAX_SAMPLES), (messages.MAX_STEPS, 1), (messages.MAX_STEPS, messages.MAX_SAMPLES)):
        record = msgspec.structs.replace(CONTRIBUTION, steps=steps, samples=samples)
        record = decode(Contribution, encode(record), key="k")
        merged = Merged(nonce=NONCE, learner_id="a", generation=1, steps=steps, samples=samples, weight=record.weight, data=REF)
        assert decode(Merged, encode(merged), key="k") == merged
    for field in ("steps", "samples"):
        too_many = json.loads(encode(CONTRIBUTION)) | {field: getattr(messages, f"MAX_{field.upper()}") + 1}
        with pytest.raises(CorruptObject, match=field):
            decode(Contribution, json.dumps(too_many).encode(), key="k")


def test_a_record_that_is_too_long_is_refused_before_it_is_decoded(mailbox: MemoryMailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_RECORD_BYTES", 100)
    mailbox.put("k", b'{"count": 1, "state": "training"' + b" " * 200 + b"}")
    with pytest.raises(CorruptObject, match="longer than the 100 bytes"):
        read(mailbox, Beat, "k")


def test_a_weight_is_quantity_times_batch_size() -> None:
    """samples × (samples / steps), arXiv 2604.21428."""
    assert CONTRIBUTION.weight == 640 * (640 / 20)


def test_only_a_missing_contribution_may_be_offered_again() -> None:
    assert LeftOut(nonce=NONCE, learner_id="a", reason="missing").retry
    assert not LeftOut(nonce=NONCE, learner_id="a", reason="tensor 'w' is not finite").retry


def test_a_run_of_another_protocol_is_refused_with_the_cure() -> None:
    manifest = next(record for record in RECORDS if isinstance(record, Manifest))
    check_manifest(manifest)
    with pytest.raises(RunMismatch, match=rf"protocol 99.*speaks {PROTOCOL}.*install"):
        check_manifest(msgspec.structs.replace(manifest, protocol=99))


def test_a_manifest_without_an_initial_value_for_each_fragment_is_corrupt() -> None:
    manifest = next(record for record in RECORDS if isinstance(record, Manifest))
    with pytest.raises(CorruptObject, match="1 fragments and 0 initial values"):
        check_manifest(msgspec.structs.replace(manifest, initial=()))
