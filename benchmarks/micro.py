"""Parts by themselves, each against the plainest code that does the same: merging, large objects, a step, a start."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import host_memory, machine
from gradientmail_torch.algorithms import wire
from gradientmail_torch.algorithms.merge import Weighted, merge, norms
from gradientmail_torch.messages import TensorSpec

MIB = 1 << 20


RESULTS = Path(__file__).parent / "results" / "parts.json"


def run(names: list[str]) -> dict[str, Any]:
    """Measure the parts named, or all, and keep their figures for the report."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names or [*CHECKS]:
        before, at = machine.busy_cpu_s(), time.monotonic()
        own = time.process_time()
        known[name] = CHECKS[name]()
        busy = (machine.busy_cpu_s() - before - (time.process_time() - own)) / (time.monotonic() - at)
        known[name]["cores_beside"] = round(max(0.0, busy), 2)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    return known


def best_of(action: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of some runs, after one to warm up."""
    action()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return min(taken)


def merging(contributions: int = 8, mib: int = 64, tensors: int = 16) -> dict[str, Any]:
    """RDA and the weighted mean of some fragments against a weighted sum by torch alone."""
    numel = mib * MIB // 4 // tensors
    specs = [TensorSpec(name=f"w{i}", shape=(numel,), dtype="float32") for i in range(tensors)]
    deltas = [[torch.randn(numel) for _ in specs] for _ in range(contributions)]
    weights = [float(1 + i) for i in range(contributions)]
    given = [Weighted(weight=weight, tensors=delta, norms=norms(delta, specs)) for weight, delta in zip(weights, deltas, strict=True)]

    def plain() -> list[Tensor]:
        sums = [torch.zeros(numel) for _ in specs]
        for weight, delta in zip(weights, deltas, strict=True):
            for total, tensor in zip(sums, delta, strict=True):
                total.add_(tensor, alpha=weight)
        return [total.div_(sum(weights)) for total in sums]

    base = best_of(plain)
    rda, mean = (best_of(lambda method=method: merge(lambda: given, specs, method)) for method in ("rda", "mean"))
    return {"plain_s": round(base, 4), "rda_of_plain": round(rda / base, 2), "mean_of_plain": round(mean / base, 2)}


def formats(mib: int = 64) -> dict[str, Any]:
    """Rates of encoding and decoding fp32 tensors, in MiB of fp32 a second on one thread."""
    specs = [TensorSpec(name=f"w{i}", shape=(MIB,), dtype="float32") for i in range(mib // 4)]
    values = [torch.randn(MIB) * 1e-3 for _ in specs]
    found: dict[str, Any] = {}
    for form in wire.WIRES:
        data = wire.encode(values, specs, form)
        encoding = best_of(lambda form=form: wire.encode(values, specs, form), 3)
        decoding = best_of(lambda form=form, data=data: wire.decode(data, specs, form, key="benchmark"), 3)
        found[form] = {"encode": round(mib / encoding), "decode": round(mib / decoding), "bytes_of_fp32": round(len(data) / (mib * MIB), 3)}
    return found


def transfer(mib: int = 256) -> dict[str, Any]:
    """One large object up and down through the mailbox, against the fastest ways of boto3 that we know."""
    from gradientmail_torch import open_mailbox
    from gradientmail_torch.testing.s3_server import S3Server

    data = os.urandom(MIB) * mib
    with tempfile.TemporaryDirectory(dir=_fast_directory()) as directory, S3Server(directory) as server:
        os.environ.update(server.env)
        box = open_mailbox(server.url("micro"))
        raw = _RawS3(server.endpoint_url, server.bucket)
        up = {"mailbox": best_of(lambda: box.put("large", data), 3), "raw": best_of(lambda: raw.put("raw", data), 3)}
        down = {"mailbox": best_of(lambda: box.get("large"), 3), "raw": best_of(lambda: raw.get("raw", len(data)), 3)}
        assert box.get("large") == data
    return {
        "up_mib_per_s": {name: round(mib / taken) for name, taken in up.items()},
        "down_mib_per_s": {name: round(mib / taken) for name, taken in down.items()},
        "up_of_raw": round(up["raw"] / up["mailbox"], 2),
        "down_of_raw": round(down["raw"] / down["mailbox"], 2),
    }


class _RawS3:
    """The fastest of the ways that were tried by hand: unsigned multipart uploads, ranged reads into one buffer."""

    def __init__(self, endpoint_url: str, bucket: str) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        options = Config(s3={"addressing_style": "path", "payload_signing_enabled": False}, max_pool_connections=32,
                         request_checksum_calculation="when_required", response_checksum_validation="when_required")  # fmt: skip
        self.client = boto3.session.Session().client("s3", endpoint_url=endpoint_url, region_name="auto", config=options)
        self.bucket = bucket
        self.transfer = TransferConfig(multipart_chunksize=8 * MIB, max_concurrency=10, preferred_transfer_client="classic")

    def put(self, key: str, data: bytes) -> None:
        self.client.upload_fileobj(BytesIO(data), self.bucket, key, Config=self.transfer)

    def get(self, key: str, size: int, part: int = 16 * MIB, threads: int = 4) -> bytearray:
        buffer = bytearray(size)

        def fetch(begin: int) -> None:
            end = min(begin + part, size)
            answer = self.client.get_object(Bucket=self.bucket, Key=key, Range=f"bytes={begin}-{end - 1}")
            view = memoryview(buffer)[begin:end]
            while len(view):
                view = view[answer["Body"].readinto(view) :]

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fetch, range(0, size, part)))
        return buffer


def _fast_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def step(repeats: int = 20_000) -> dict[str, Any]:
    """Microseconds of a ``session.step`` at which nothing is due."""
    from benchmarks import work
    from gradientmail_torch import DecoupledDiLoCo, Session

    with tempfile.TemporaryDirectory() as directory:
        session = Session(
            work.make_model(0), mailbox=directory, learner_id="node-0", algorithm=DecoupledDiLoCo(sync_every=10**9), lease=600.0
        )
        taken = []
        with session:
            for _ in range(repeats):
                began = time.perf_counter()
                session.step(samples=8)
                taken.append(time.perf_counter() - began)
            session.leave(timeout=0.0, contribute=False)
    taken.sort()
    return {"p50_us": round(1e6 * taken[len(taken) // 2], 2), "p99_us": round(1e6 * taken[len(taken) * 99 // 100], 2)}


def start(repeats: int = 5) -> dict[str, Any]:
    """Seconds from an interpreter with torch (and Lightning) imported to a session that has joined, in fresh processes."""
    taken = [json.loads(subprocess.check_output([sys.executable, "-c", _START], cwd=Path(__file__).parent.parent)) for _ in range(repeats)]
    return {name: round(statistics.median(each[name] for each in taken), 3) for name in taken[0]}


_START = """
import json, sys, tempfile, time
from benchmarks import work  # with torch
import lightning
model = work.make_model(0)
at = [time.perf_counter()]
from gradientmail_torch import Session
at.append(time.perf_counter())
import gradientmail_torch.lightning
at.append(time.perf_counter())
with tempfile.TemporaryDirectory() as directory:
    began = time.perf_counter()
    first = Session(model, mailbox=directory, learner_id="node-0")
    founded = time.perf_counter()
    second = Session(work.make_model(1), mailbox=directory, learner_id="node-1")
    joined = time.perf_counter()
    second.leave(); first.leave()
figures = {"import_s": at[1] - at[0], "import_lightning_part_s": at[2] - at[1], "found_s": founded - began, "join_s": joined - founded}
print(json.dumps(figures))
"""

CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "merging": merging,
    "formats": formats,
    "transfer": transfer,
    "step": step,
    "start": start,
    "memory": host_memory.measure,
}
