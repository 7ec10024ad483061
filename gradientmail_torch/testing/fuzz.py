"""Feeds altered objects to everything that reads what a mailbox holds: ``python -m gradientmail_torch.testing.fuzz``.

Whatever bytes lie in a mailbox, reading them gives the right value or an error of this package: never another
exception, a hang, or more memory than the object's length allows. A finding is reported with what repeats it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import resource
import struct
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradientmail_torch.errors import GradientMailError
from gradientmail_torch.testing.codecs import Codec, codecs

BYTES_PER_BYTE = 100
"""What Python's objects may take for each byte that is read: ``[[],[],…`` is the worst."""
FREE_BYTES = 1 << 20
MAX_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
"""How much more than at the beginning the process may take, tensors and all."""
SILENT_S = 60
TRACED_EVERY = 20
"""Memory is measured at one object in so many, since that takes time; the process's limit holds at each."""

Verdict = Literal["read", "refused"]


class Finding(AssertionError):
    """An object was read wrongly."""


MAX_FINDINGS = 20


@dataclass(slots=True)
class Report:
    """How often each codec has read an object, and refused one."""

    verdicts: dict[str, Counter[Verdict]] = field(default_factory=dict)
    slowest_s: float = 0.0
    most_bytes: int = 0
    findings: list[str] = field(default_factory=list)

    def note(self, codec: str, verdict: Verdict) -> None:
        self.verdicts.setdefault(codec, Counter())[verdict] += 1

    def text(self) -> str:
        rows = [f"{'codec':24} {'read':>8} {'refused':>8}"]
        rows += [f"{name:24} {counts['read']:8} {counts['refused']:8}" for name, counts in self.verdicts.items()]
        total = sum(sum(counts.values()) for counts in self.verdicts.values())
        return "\n".join([*rows, f"{total} objects, the slowest {self.slowest_s:.3f} s, at most {self.most_bytes} bytes allocated for one"])


def explore(objects: int, *, seed: int, chosen: Iterable[Codec] | None = None, first: int = 0) -> Report:
    """Read ``objects`` altered objects, as many of each codec; ends early when much is found."""
    report = Report()
    chosen = list(chosen or codecs())
    for number in range(first, first + objects):
        codec = chosen[number % len(chosen)]
        data = altered(codec, seed, number)
        began = _computed_s()
        try:
            if number // len(chosen) % TRACED_EVERY == 0:
                verdict, peak = _traced(codec, data)
                report.most_bytes = max(report.most_bytes, peak)
                _require(peak <= BYTES_PER_BYTE * len(data) + FREE_BYTES, f"took {peak} bytes for {len(data)}")
            else:
                verdict = examine(codec, data)
            seconds = _computed_s() - began
            _require(seconds <= MAX_SECONDS, f"took {seconds:.1f} s")
        except Exception as error:
            shown = data if len(data) <= 2000 else data[:1000] + b" ... " + data[-1000:]
            report.findings.append(
                f"{codec.name}, object {number} of seed {seed}: {type(error).__name__}: {error}\n"
                f"again with: --seed {seed} --first {number} --objects 1\n{shown!r}"
            )
            if len(report.findings) == MAX_FINDINGS:
                break
            continue
        report.slowest_s = max(report.slowest_s, seconds)
        report.note(codec.name, verdict)
    return report


def examine(codec: Codec, data: bytes) -> Verdict:
    """Whether ``codec`` reads or refuses ``data``; raises what it must not."""
    try:
        value = codec.read(data)
    except GradientMailError:
        return "refused"
    _require(codec.sound(data, value), f"was read as {str(value)[:500]}")
    return "read"


def _traced(codec: Codec, data: bytes) -> tuple[Verdict, int]:
    tracemalloc.start()
    try:
        verdict = examine(codec, data)
        return verdict, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _computed_s() -> float:
    """Of this thread: others may keep it waiting."""
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_utime + used.ru_stime


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Finding(otherwise)


# --- altering ----------------------------------------------------------------------------------------

_TOKENS = [
    *(b"0", b"9", b"-1", b"1e999", b"NaN", b"9" * 30, b"9" * 400, b'"', b"\\", b"\\ud800", b"\\u0000", b"[", b"]", b"{", b"}", b":", b","),
    *(b"null", b"true", b"\0", b"\xff", b"\xc3\x28", b"/", b"//", b"..", b"%", b"%2F", b"%ff", b" ", b"\n", b"~", b"GMS1", b"\xd9\xa0"),
]
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e30, 1e31, 1e308, 5e-324),
    *("", "a", "ä", "\ud800", "\0", "../../x", "a" * 1025, "0" * 64, "F32", "BF16", [], {}, [[]], [0] * 50, {"a": 1}, {"": {}}),
]
_RAW = ["NaN", "1e999", "-1e999", "9" * 400, "9" * 5000, "0" * 50, "1.5e", "[" * 3000, '{"a":' * 3000, '"\\ud800"', "tru"]
_BOMBS: list[Callable[[int], bytes]] = [
    lambda n: b"[" * n, lambda n: b'{"a":' * n, lambda n: b"[" + b"[]," * n + b"[]]", lambda n: b"[" + b"0," * n + b"0]",
    lambda n: b'"' + b"\\u0000" * n + b'"', lambda n: b"9" * n, lambda n: b" " * n, lambda n: bytes(n), lambda n: b"%41" * n,
    lambda n: b"{" + b",".join(b'"%d":0' % i for i in range(n // 8)) + b"}", lambda n: b"a/" * n,
]  # fmt: skip


def altered(codec: Codec, seed: int, number: int) -> bytes:
    """One altered object; the same for the same arguments."""
    rng = random.Random(f"{seed} {codec.name} {number}")
    data = rng.choice(codec.specimens)
    if rng.random() < 0.02:
        return data  # now and then untouched: it must be read
    if rng.random() < 0.01:
        place = rng.randrange(len(data) + 1)
        return data[:place] + rng.choice(_BOMBS)(rng.randrange(1, 60_000)) + data[place + rng.choice((0, 1, len(data))) :]
    if codec.form == "json" and rng.random() < 0.6:
        return _altered_json(rng, data)
    if codec.form == "safetensors" and rng.random() < 0.8:
        return _altered_tensors(rng, data)
    return _altered_bytes(rng, data, rng.choice(codec.specimens))


def _altered_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(result) + 1)
        length = min(rng.choice((1, 1, 2, 4, 16, 100)), len(result) - place)
        match rng.randrange(6):
            case 0:
                result[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                result[place : place + rng.randint(0, 1)] = rng.choice(_TOKENS)
            case 2:
                del result[place : place + length]
            case 3:
                result[place:place] = result[place : place + length]
            case 4:
                start = rng.randrange(len(other) + 1)
                result[place : place + length] = other[start : start + length]
            case _:
                del result[place:]
    return bytes(result)


def _altered_json(rng: random.Random, data: bytes) -> bytes:
    """Sound JSON, most of the time, with one to three of its values changed, removed or exchanged."""
    content = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        content = _with_change(rng, content)
    text = json.dumps(content, ensure_ascii=rng.random() < 0.5)
    return text.replace('"@raw@"', rng.choice(_RAW)).encode("utf-8", "surrogatepass")


def _with_change(rng: random.Random, content: Any) -> Any:
    places = list(_places(content))
    if not places:
        return rng.choice(_VALUES)
    holder, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del holder[key]
        case 1:
            holder[key] = "@raw@"
        case 2:
            other, other_key = rng.choice(places)
            holder[key] = json.loads(json.dumps(other[other_key]))
        case 3 if isinstance(holder, dict):
            holder[rng.choice(["x", "", "ä", "__metadata__", str(key).upper()])] = holder.pop(key)
        case 4 if isinstance(holder[key], int):
            holder[key] += rng.choice((1, -1, 2**32, -(2**32)))
        case _:
            holder[key] = json.loads(json.dumps(rng.choice(_VALUES)))
    return content


def _places(content: Any) -> Iterable[tuple[Any, Any]]:
    members: Iterable[Any] = content.keys() if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in list(members):
        yield content, key
        yield from _places(content[key])


def _altered_tensors(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file whose header has changed and whose length mostly fits again, or whose body has changed."""
    (length,) = struct.unpack_from("<Q", data)
    header, body = data[8 : 8 + length], data[8 + length :]
    match rng.randrange(4):
        case 0:
            body = _altered_bytes(rng, body, data)
        case 1:
            header = _altered_bytes(rng, header, data)
        case _:
            header = _altered_json(rng, header)
    stated = len(header) if rng.random() < 0.8 else rng.choice((0, 1, length, 2**31, 2**63, 2**64 - 1, len(header) + 1))
    return struct.pack("<Q", stated) + header + body


# --- the command ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gradientmail_torch.testing.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first object")
    parser.add_argument("--codec", action="append", help="one codec alone; may be given several times")
    options = parser.parse_args(arguments)
    known: Mapping[str, Codec] = {codec.name: codec for codec in codecs()}
    if unknown := set(options.codec or ()) - known.keys():
        parser.error(f"no codec {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    limit_memory(MEMORY_BYTES)
    faulthandler.enable()
    faulthandler.dump_traceback_later(SILENT_S + options.objects / 500, exit=True)
    report = explore(options.objects, seed=options.seed, chosen=[known[name] for name in options.codec or known], first=options.first)
    faulthandler.cancel_dump_traceback_later()
    print(*report.findings, report.text(), sep="\n\n")
    return 1 if report.findings else 0


def limit_memory(more_bytes: int) -> None:
    """Let this process take at most so much more address space than it has now."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))


if __name__ == "__main__":
    sys.exit(main())
