"""Everything that reads what a mailbox holds, with specimens of what it reads: what :mod:`fuzz` alters."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from gradientmail_torch import keys, messages
from gradientmail_torch.algorithms import wire
from gradientmail_torch.errors import InvalidName
from gradientmail_torch.mailbox import SignedMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.mailbox.signed import CHUNK_BYTES
from gradientmail_torch.messages import Record, TensorSpec
from gradientmail_torch.patterns import beat_helper, leased_work, queue_items, queue_taker
from gradientmail_torch.patterns.json_values import from_json
from gradientmail_torch.patterns.steering import wire as steering_wire
from gradientmail_torch.patterns.steering.queues import claims
from gradientmail_torch.patterns.steering.result import Result
from gradientmail_torch.patterns.steering.serialization import Payload
from gradientmail_torch.patterns.steering.serialization import decode as decode_value
from gradientmail_torch.patterns.steering.serialization import encode as encode_value
from gradientmail_torch.patterns.synchronization import ledger, payload

_NONCE = "0123456789abcdef"
_KEY = "data/0000/0000000003/node-0-0123456789abcdef.delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    name: str
    form: Literal["json", "safetensors", "bytes"]
    specimens: tuple[bytes, ...]
    read: Callable[[bytes], Any]
    """Raises errors of this package alone."""
    sound: Callable[[bytes, Any], bool]
    """Whether what was read is right for these bytes."""


def codecs() -> Iterator[Codec]:
    yield from (_record(kind, specimens) for kind, specimens in _records().items())
    yield from map(_tensors, wire.WIRES)
    yield _signed()
    yield from (_keys(name, specimens, read) for name, (specimens, read) in _KEYS.items())
    yield Codec(
        name="json values",
        form="json",
        specimens=(b'{"a": [1, 2.5, null, true, "x"], "b": {"c": []}}', b"[1, -2, 1e3]"),
        read=lambda data: from_json(data, what="a value"),
        sound=lambda data, value: _finite(value),
    )
    yield from _steering()


# --- records -----------------------------------------------------------------------------------------


def _records() -> dict[type[Record], list[Record]]:
    ref = messages.DataRef(key=_KEY, size=12, sha256="ab" * 32, wire="bf16")
    specs = (
        TensorSpec(name="layer.weight", shape=(3, 2), dtype="float32", embedding=True),
        TensorSpec(name="norm.batches", shape=(), dtype="int64", kind="buffer"),
    )
    merged = messages.Merged(nonce=_NONCE, learner_id="node-0", generation=1, steps=5, samples=80, weight=1280.0, data=ref, clips={0: 0.5})
    found: list[Record] = [
        ref,
        *specs,
        merged,
        messages.LeftOut(nonce=_NONCE, learner_id="node-1", reason="missing"),
        messages.Claim(nonce=_NONCE, learner_id="node-0", generation=1),
        messages.LifeRecord(nonce=_NONCE, host="h", machine="m", pid=7, started_at=1.5),
        messages.Beat(
            count=3, state="training", steps=4, samples=8, seconds_per_step=0.5, uplink=1e6, versions=(1, 2), at=1.5, requests={"get": 3}
        ),
        messages.Contribution(
            nonce=_NONCE, learner_id="node-0", generation=1, steps=5, samples=80, norms=(0.5, 0.0), anchor="init", data=ref
        ),
        messages.Manifest(
            protocol=messages.PROTOCOL, nonce=_NONCE, founder="node-0", founded_at=1.5, layout=(specs,), initial=(ref,),
            algorithm={"name": "DecoupledDiLoCo", "outer.lr": 1.0, "quorum": 1, "buffers": True},
        ),
        messages.Commit(
            nonce=_NONCE, fragment=0, version=4, by="node-0", generation=2, after=_NONCE, update=ref, parameters=ref, outer=ref,
            method="rda", merged=(merged,), ahead=(messages.SummedAhead(contributions=1, by="node-0", data=ref),), whole=ref,
            left_out=(messages.LeftOut(nonce="", learner_id="b", reason="it is not finite"),), at=1.5,
        ),
        messages.SummedAhead(contributions=1, by="node-0", data=ref),
        messages.Partial(
            nonce=_NONCE, fragment=0, version=4, group=1, by="node-0", generation=2, method="rda", merged=(merged,), radii=(0.5, 0.0),
            data=ref,
        ),
        leased_work.Outcome(item="1", status="done", nonce=_NONCE, attempt=1, owner="a", value=msgspec.Raw(b'{"x":[1]}')),
        leased_work._ClaimRecord(nonce=_NONCE, owner="a", beat=3, at=1.5),
        beat_helper.Beat(count=3, holds=(_NONCE,), at=1.5),
        queue_items.Manifest(nonce=_NONCE, digest="ab" * 32, count=3, blocks=("cd" * 32,)),
        queue_taker.GivenUp(nonce=_NONCE, attempt=1, owner="a", error="x"),
        ledger.Manifest(nonce=_NONCE, predecessors={"b": ("a",)}, triggers={"b": "any_called"}),
        ledger.Marker(nonce=_NONCE, reached="called", payload=payload.PayloadRef(kind="json", inline=b"1"), owner="a"),
        payload.PayloadRef(kind="bytes", data=ref),
        claims.ServerRecord(nonce=_NONCE, count=1, server_id="s", slots=2, methods=("f",)),
        claims.StopRecord(nonce=_NONCE),
    ]  # fmt: skip
    by_kind: dict[type[Record], list[Record]] = {}
    for record in found:
        by_kind.setdefault(type(record), []).append(record)
    return by_kind


def _record(kind: type[Record], specimens: list[Record]) -> Codec:
    def sound(data: bytes, value: Record) -> bool:
        return isinstance(value, kind) and messages.decode(kind, messages.encode(value), key="again") == value

    module = kind.__module__.rpartition(".")[2]
    return Codec(
        name=kind.__name__ if module == "messages" else f"{module}.{kind.__name__}",
        form="json",
        specimens=tuple(map(messages.encode, specimens)),
        read=lambda data: messages.decode(kind, data, key="fuzzed"),
        sound=sound,
    )


# --- tensors and signed objects ------------------------------------------------------------------------

_SPECS = (
    TensorSpec(name="layer.weight", shape=(3, 150), dtype="float32"),
    TensorSpec(name="scale", shape=(), dtype="bfloat16"),
    TensorSpec(name="empty", shape=(0, 4), dtype="float32"),
    TensorSpec(name="norm.mean", shape=(4,), dtype="float32", kind="buffer"),
    TensorSpec(name="norm.batches", shape=(), dtype="int64", kind="buffer"),
    TensorSpec(name="mask", shape=(5,), dtype="bool", kind="buffer"),
)


def _tensors(form: str) -> Codec:
    rng = torch.Generator().manual_seed(1)
    values = [torch.randn(spec.shape, generator=rng).to(getattr(torch, spec.dtype)) for spec in _SPECS]

    def sound(data: bytes, found: list[torch.Tensor]) -> bool:
        return all(
            tuple(tensor.shape) == spec.shape and tensor.dtype == (torch.float32 if spec.floating else getattr(torch, spec.dtype))
            for tensor, spec in zip(found, _SPECS, strict=True)
        )

    return Codec(
        name=f"wire {form}",
        form="safetensors",
        specimens=(wire.encode(values, _SPECS, form),),
        read=lambda data: wire.decode(data, _SPECS, form, key="fuzzed"),
        sound=sound,
    )


def _signed() -> Codec:
    store = MemoryMailbox()
    signed = SignedMailbox(store, "a secret of the run, long enough")
    contents = (b"", b"{}", bytes(1000), bytes(CHUNK_BYTES) + b"tail")
    sealed = {}
    for content in contents:
        signed.put("fuzzed", content)
        sealed[store.get("fuzzed")] = content

    def read(data: bytes) -> tuple[bytes | None, bytes | None]:
        store.put("fuzzed", data)
        return signed.get("fuzzed", length=2 * CHUNK_BYTES), signed.get("fuzzed", start=7, length=20)

    def sound(data: bytes, found: tuple[bytes | None, bytes | None]) -> bool:
        content = sealed.get(data)
        return content is not None and found == (content, content[7:27])

    return Codec(name="signed", form="bytes", specimens=tuple(key for key in sealed if key is not None), read=read, sound=sound)


# --- keys ----------------------------------------------------------------------------------------------


def _keys(name: str, specimens: tuple[str, ...], read: Callable[[str], str]) -> Codec:
    """``read`` gives the key that is built from what was parsed: it must be the one that was read."""
    return Codec(
        name=f"key {name}",
        form="bytes",
        specimens=tuple(map(str.encode, specimens)),
        read=lambda data: read(data.decode("utf-8", "surrogateescape")),
        sound=lambda data, rebuilt: rebuilt.encode("utf-8", "surrogateescape") == data,
    )


def _round(key: str) -> str:
    found = keys.parse_round(key)
    return keys.join(
        key.split("/", 1)[0], keys.number(found.fragment, 4), keys.number(found.version), *([found.last] if found.last else [])
    )


def _arrival(key: str) -> str:
    learner_id = keys.parse_arrival(key)
    if learner_id is None or not key.startswith("barriers/start/"):
        raise InvalidName(key)
    return keys.barrier("start", keys.check_learner_id(learner_id))


def _life(key: str) -> str:
    life = keys.parse_life(key)
    return keys.join(key.split("/", 1)[0], keys.check_learner_id(life.learner_id), keys.number(life.generation, 6))


def _contribution(key: str) -> str:
    found = keys.parse_contribution(key)
    return keys.contribution(found.fragment, found.version, keys.check_learner_id(found.last))


def _commit(key: str) -> str:
    found = keys.parse_commit(key)
    return keys.commit(found.fragment, found.version)


_KEYS: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "life": (("learners/node-0/000001", "beats/node-1/000012"), _life),
    "round": (
        (
            "rounds/0001/0000000012/node-0",
            "claims/0000/0000000003/000001",
            "partials/0000/0000000003/000001",
            _KEY,
            "commits/0001/0000000002",
        ),
        _round,
    ),
    "contribution": (("rounds/0001/0000000012/node-0",), _contribution),
    "commit": (("commits/0001/0000000002",), _commit),
    "arrival": (("barriers/start/node-0",), _arrival),
    "any": (("run.json", _KEY, "barriers/a%2Fb%20c/node-0", "queues/x/claims/1/000001"), keys.check_key),
}
# Names in these may be encoded in more ways than one, so that what is read need not be what was written.
_LENIENT_KEYS: dict[str, tuple[tuple[str, ...], Callable[[str], object]]] = {
    "claim": (("queues/x/claims/0000000001/000002", "sync/r/node/n/claims/n/000001"), keys.parse_claim),
    "marker": (("sync/r/node/n/reached/a/b%20c",), keys.parse_reached),
    "synchronization": (("sync/r/workflow/manifest", "sync/r/node/n/reached/a/b"), keys.SyncKeys.containing),
    "request": (("steering/q/requests/f/000001700000000-ab12.topic",), keys.parse_request),
    "result": (
        ("steering/q/results/topic/000001700000000-ab12", "steering/q/results/t/000001700000000-ab12.000001.000002"),
        keys.parse_result,
    ),
}


def _lenient_keys(name: str, specimens: tuple[str, ...], read: Callable[[str], object]) -> Codec:
    return Codec(
        name=f"key {name}",
        form="bytes",
        specimens=tuple(map(str.encode, specimens)),
        read=lambda data: read(data.decode("utf-8", "surrogateescape")),
        sound=lambda data, value: value is not None,
    )


# --- steering ------------------------------------------------------------------------------------------


def _steering() -> Iterator[Codec]:
    yield from (_lenient_keys(name, specimens, read) for name, (specimens, read) in _LENIENT_KEYS.items())
    result = Result((("a",), {"b": 1}), method="f", topic="t")
    always = {"task_id": "ab12", "timestamp": {"created": 1.5}}  # the same in every process, so that a finding can be repeated
    texts = [json.dumps({**result.to_dict(), **always, "inputs": [['"a"'], {"b": "1"}], "value": "[2]"}).encode()]
    yield Codec(
        name="steering result",
        form="json",
        specimens=tuple(texts),
        read=lambda data: steering_wire.load(data, lambda reference: None, allow_pickle=False),
        sound=lambda data, value: isinstance(value, Result),
    )
    values = [
        encode_value([1, "x", b"abc"], "json"),
        encode_value({"t": torch.ones(2, 3)}, "json"),
        encode_value({"a": [1.5, None]}, "json"),
    ]
    yield _values("json", values)
    yield _values("safetensors", values)
    packed = msgspec.msgpack.encode((texts[0].replace(b'"[2]"', b'{"$body": 0, "form": "json"}'), [b"[1]"]))
    yield Codec(
        name="steering message",
        form="bytes",
        specimens=(packed,),
        read=lambda data: steering_wire.unpack(data, allow_pickle=False),
        sound=lambda data, value: isinstance(value, Result),
    )


def _values(form: Literal["json", "safetensors"], specimens: list[Payload]) -> Codec:
    return Codec(
        name=f"steering {form}",
        form=form,
        specimens=tuple(each.data for each in specimens if each.form == form),
        read=lambda data: decode_value(Payload(data, form)),
        sound=lambda data, value: True,  # any value may be sent
    )


def _finite(value: Any) -> bool:
    match value:
        case float():
            return math.isfinite(value)
        case list():
            return all(map(_finite, value))
        case dict():
            return all(map(_finite, value.values()))
        case _:
            return True
