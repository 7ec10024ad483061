"""How a run's cost and speed change with the number of its nodes: real sessions on a simulated cluster.

The model is a stand-in whose tensors are tiny, while the network charges each object of ``data/`` as if the model had
``PARAMETERS`` of them, in as many fragments as a session would divide that into. Virtual time makes hours of a
thousand nodes a matter of minutes; requests, bytes and dollars are what a store would bill.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.fibres import FibreKernel
from benchmarks.machine import revision
from gradientmail_torch import keys, messages
from gradientmail_torch.algorithms import DecoupledDiLoCo, quorum
from gradientmail_torch.cli import plan, prices
from gradientmail_torch.clock import Clock
from gradientmail_torch.mailbox.base import Body, Mailbox, read_body
from gradientmail_torch.session import Session
from gradientmail_torch.testing.simulation import Conditions, Event, SimulatedCluster

RESULTS = Path(__file__).parent / "results" / "scale.jsonl"
PARAMETERS = 1e9
FRAGMENTS = plan.fragments_for(PARAMETERS)
ELEMENTS = 64
"""Of a fragment as it is really held."""
TIMES = PARAMETERS / FRAGMENTS / ELEMENTS
"""Bytes on the simulated network for each byte of tensors."""
STEP_S = 1.0
QUEUED_BYTES = 1 << 20
"""Transfers of so many bytes wait for those before them on the link; smaller ones slip through, as packets do."""
PAGE_KEYS = 1000
KEY_BYTES = 250
"""About what a key takes in the answer to a listing, besides itself."""
NODES = (4, 16, 64, 256, 1024)
LATENCIES_S = (0.02, 0.2)
LINKS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run that is measured."""

    nodes: int
    latency_s: float = 0.02
    """Mean time of a request without its bytes; it varies by half."""
    link: str = "1gbit"
    cycles: float = 3.0
    """Cycles over which is counted."""
    after: float = 1.0
    """Cycles that pass before: the first round of each fragment is merged without groups, which takes long where nodes are many."""
    seed: int = 0

    @property
    def bits_per_s(self) -> float:
        """Of each node, in each direction; the store has no limit."""
        return LINKS[self.link]

    def sync_every(self) -> int:
        """The cycle that ``gradientmail plan`` recommends for this link, at least 50 steps."""
        situation = plan.Situation(
            parameters=PARAMETERS,
            nodes=self.nodes,
            uplink_bits_per_s=self.bits_per_s,
            downlink_bits_per_s=self.bits_per_s,
            seconds_per_step=STEP_S,
        )
        load = (2 * PARAMETERS * 2 / (self.bits_per_s / 8)) / plan.LINK_LOAD
        return next(cycle for cycle in plan.NICE_CYCLES if cycle >= max(50.0, load / situation.seconds_per_step))


# --- the network ---------------------------------------------------------------------------------------


class _Link:
    """One direction of a node's link. Large transfers go one after the other."""

    def __init__(self, clock: Clock, bits_per_s: float) -> None:
        self._clock = clock
        self._bytes_per_s = bits_per_s / 8
        self._free_at = 0.0

    def carry(self, size_bytes: float) -> None:
        now, takes_s = self._clock.monotonic(), size_bytes / self._bytes_per_s
        self._free_at = max(now, self._free_at) + takes_s
        if size_bytes >= QUEUED_BYTES:
            self._clock.sleep(self._free_at - now)


class MeteredMailbox:
    """A node's way to the store: counts what would be billed, and takes the time that its bytes would take."""

    def __init__(self, inner: Mailbox, clock: Clock, bits_per_s: float) -> None:
        self.inner = inner
        self.requests: Counter[str] = Counter()
        """By operation and kind of object, such as ``get beats``."""
        self.up: Counter[str] = Counter()
        """Bytes by kind of object."""
        self.down: Counter[str] = Counter()
        self._uplink, self._downlink = _Link(clock, bits_per_s), _Link(clock, bits_per_s)

    def __repr__(self) -> str:
        return repr(self.inner)

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        found = self.inner.get(key, start=start, length=length)
        kind = _kind(key)
        self.requests[f"get {kind}"] += 1
        if found is not None:
            size = _size(key, found)
            self.down[kind] += size
            self._downlink.carry(size)
        return found

    def put(self, key: str, body: Body) -> None:
        self.inner.put(key, self._sent(key, body))

    def put_if_absent(self, key: str, body: Body) -> bool:
        return self.inner.put_if_absent(key, self._sent(key, body))

    def _sent(self, key: str, body: Body) -> bytes:
        data, kind = read_body(body), _kind(key)
        self.requests[f"put {kind}"] += 1
        if kind != "init":  # a run is founded once
            size = _size(key, data)
            self.up[kind] += size
            self._uplink.carry(size)
        return data

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        kind = f"list {_kind(prefix)}"
        self.requests[kind] += 1
        size = 0
        try:
            for number, key in enumerate(self.inner.list(prefix, after=after), 1):
                size += len(key) + KEY_BYTES
                yield key
                if number % PAGE_KEYS == 0:
                    self.requests[kind] += 1
        finally:
            self.down[kind] += size

    def delete(self, key: str) -> None:
        self.requests[f"delete {_kind(key)}"] += 1
        self.inner.delete(key)


def _kind(key: str) -> str:
    """``data`` objects by their part: ``delta``, ``update``, …; others by the first segment of their key."""
    first = key.partition("/")[0]
    return key.rpartition(".")[2] if first == "data" and "." in key else first


def _size(key: str, data: bytes) -> int:
    """Bytes that an object would have with a model of ``PARAMETERS``."""
    if not key.startswith(("data/", "init/")):
        return len(data)
    header = 8 + int.from_bytes(data[:8], "little")  # safetensors
    return header + round((len(data) - header) * TIMES)


# --- the nodes -----------------------------------------------------------------------------------------


class _Model(nn.Module):
    """One parameter for each fragment, all in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.zeros(FRAGMENTS * ELEMENTS)
        for index, part in enumerate(self.whole.split(ELEMENTS)):
            self.register_parameter(f"p{index:02}", nn.Parameter(part))


@dataclass
class _Node:
    point: Point
    cluster: SimulatedCluster
    number: int
    step_s: float
    adopted: dict[tuple[int, int], list[float]]
    """When each version was adopted, of all nodes."""
    box: MeteredMailbox = field(init=False)
    session: Session | None = None
    joined_after_s: float = 0.0

    def __post_init__(self) -> None:
        self.box = MeteredMailbox(self.cluster.mailbox, self.cluster.clock, self.point.bits_per_s)

    def train(self) -> None:
        clock, model, began = self.cluster.clock, _Model(), self.cluster.now_s
        algorithm = DecoupledDiLoCo(sync_every=self.point.sync_every(), fragments=FRAGMENTS)
        self.session = Session(model, mailbox=self.box, learner_id=f"node-{self.number:04}", algorithm=algorithm, clock=clock)
        self.joined_after_s = self.cluster.now_s - began
        versions = self.session.versions
        with self.session:
            while True:
                clock.sleep(self.step_s)
                model.whole += 1e-3
                self.session.step(samples=8)
                for index, (before, now) in enumerate(zip(versions, versions := self.session.versions, strict=True)):
                    if now > before:
                        self.adopted.setdefault((index, now), []).append(self.cluster.now_s)


@dataclass
class _Rounds:
    """When each round was opened and committed."""

    opened: dict[tuple[int, int], float] = field(default_factory=dict)
    contributions: Counter[tuple[int, int]] = field(default_factory=Counter)
    committed: dict[tuple[int, int], float] = field(default_factory=dict)

    def see(self, event: Event) -> None:
        if event.outcome != "created" or not event.key.startswith(("rounds/", "commits/")):
            return
        kind, fragment, version, *_ = event.key.split("/")
        place = int(fragment), int(version)
        if kind == "commits":
            self.committed[place] = event.at_s
        else:
            self.opened.setdefault(place, event.at_s)
            self.contributions[place] += 1


@cache
def _share_work() -> None:
    """All nodes are in this process: what many of them parse, decode or hash alike is worked out once."""
    keys.parse_contribution = lru_cache(1 << 20)(keys.parse_contribution)
    messages.decode = lru_cache(1 << 12)(messages.decode)
    quorum._digest = lru_cache(1 << 18)(quorum._digest)


# --- measuring -----------------------------------------------------------------------------------------


def measure(point: Point) -> dict[str, Any]:
    """Run ``point`` and count over its last cycles."""
    torch.set_num_threads(1)
    _share_work()
    began, cpu = time.monotonic(), time.process_time()
    rng = random.Random(point.seed)
    conditions = Conditions(latency_s=(0.5 * point.latency_s, 1.5 * point.latency_s), page_keys=PAGE_KEYS)
    adopted: dict[tuple[int, int], list[float]] = {}
    rounds = _Rounds()
    with SimulatedCluster(point.seed, conditions=conditions, log_events=100, kernel=FibreKernel) as cluster:
        cluster.observe(rounds.see)
        nodes = [_Node(point, cluster, number, STEP_S * rng.uniform(0.9, 1.1), adopted) for number in range(point.nodes)]
        for node in nodes:
            cluster.process(f"node-{node.number}", node.train, delay_s=0.0 if node.number == 0 else rng.uniform(2.0, 4.0))
        while not all(node.joined_after_s for node in nodes):
            cluster.advance(5.0)
        founding_s = cluster.now_s
        cycle_s = point.sync_every() * STEP_S
        cluster.advance(point.after * cycle_s)
        start_s, before = cluster.now_s, [_Count.of(node.box) for node in nodes]
        cluster.advance(point.cycles * cycle_s)
        hours = (cluster.now_s - start_s) / 3600
        used = [_Count.of(node.box) - count for node, count in zip(nodes, before, strict=True)]
        end_s = cluster.now_s
        objects = Counter(_kind(key) for key in cluster.store.list(""))
    return {
        **asdict(point),
        "revision": revision(),
        "sync_every": point.sync_every(),
        **_rates(used, hours),
        **_round_times(rounds, adopted, start_s, end_s, point.nodes),
        "merge_gb_per_cycle": _busiest_merging(used, hours * 3600 / cycle_s),
        "join_s": round(statistics.median(node.joined_after_s for node in nodes[1:]), 1),
        "all_joined_at_s": round(founding_s),
        "objects": dict(objects.most_common(8)),
        "virtual_s": round(end_s),
        "wall_s": round(time.monotonic() - began),
        "cpu_s": round(time.process_time() - cpu),
    }


@dataclass
class _Count:
    requests: Counter[str]
    up: Counter[str]
    down: Counter[str]

    @classmethod
    def of(cls, box: MeteredMailbox) -> _Count:
        return cls(box.requests.copy(), box.up.copy(), box.down.copy())

    def __sub__(self, other: _Count) -> _Count:
        return _Count(self.requests - other.requests, self.up - other.up, self.down - other.down)

    def use(self) -> prices.Use:
        by_operation = Counter[str]()
        for name, count in self.requests.items():
            by_operation[name.partition(" ")[0]] += count
        return prices.Use(
            writes=by_operation["put"] + by_operation["list"],
            reads=by_operation["get"],
            bytes_up=self.up.total(),
            bytes_down=self.down.total(),
        )


def _rates(used: Sequence[_Count], hours: float) -> dict[str, Any]:
    """Per node and hour."""
    share = 1 / hours / len(used)
    uses = [count.use() * (1 / hours) for count in used]
    mean = sum(uses, prices.Use()) * (1 / len(used))
    requests = sum((count.requests for count in used), Counter[str]())
    table = prices.load()
    asking = prices.Use(writes=mean.writes, reads=mean.reads)
    return {
        "writes": round(mean.writes),
        "reads": round(mean.reads),
        "gb_up": round(mean.bytes_up / 1e9, 2),
        "gb_down": round(mean.bytes_down / 1e9, 2),
        "gb_listed": round(sum(size for count in used for kind, size in count.down.items() if kind.startswith("list")) * share / 1e9, 3),
        "busiest_gb_down": round(max(use.bytes_down for use in uses) / 1e9, 2),
        "dollars_requests": {name: round(asking.dollars(price), 5) for name, price in table.stores.items()},
        "dollars": {name: round(mean.dollars(price), 4) for name, price in table.stores.items()},
        "by_kind": {name: round(count * share, 1) for name, count in requests.most_common()},
    }


def _round_times(
    rounds: _Rounds, adopted: Mapping[tuple[int, int], Sequence[float]], start_s: float, end_s: float, nodes: int
) -> dict[str, Any]:
    """Of the rounds that were opened after the start: from the first contribution on."""
    places = [place for place, at_s in rounds.committed.items() if at_s >= start_s and place in rounds.opened]
    closing = [rounds.committed[place] - rounds.opened[place] for place in places]
    adopting = [at_s - rounds.opened[place] for place in places for at_s in adopted.get(place, ())]
    return {
        "rounds": len(places),
        "contributions_per_round": round(statistics.fmean([rounds.contributions[place] for place in places] or [0]), 1),
        "commit_s": round(statistics.fmean(closing or [0.0]), 1),
        "adopt_s": round(statistics.fmean(adopting or [0.0]), 1),
        "open_rounds": round(len(places) and sum(closing) / (end_s - start_s), 1),
    }


def _busiest_merging(used: Sequence[_Count], cycles: float) -> float:
    """Most GB that one node downloaded in a cycle in order to merge."""
    return round(max(_merging(count.down) for count in used) / cycles / 1e9, 2)


def _merging(down: Mapping[str, int]) -> int:
    adopting = ("update", "whole", "outer")
    return sum(size for kind, size in down.items() if kind == "delta" or (kind.startswith("partial") and kind not in adopting))


# --- many points ---------------------------------------------------------------------------------------


def points(nodes: Sequence[int], latencies_s: Sequence[float], links: Sequence[str], *, cycles: float, after: float) -> list[Point]:
    return [
        Point(nodes=n, latency_s=latency_s, link=link, cycles=cycles, after=after)
        for n, latency_s, link in product(nodes, latencies_s, links)
    ]


def run_all(wanted: Sequence[Point], *, label: str, again: bool = False) -> None:
    """Measure what is not in the results yet under ``label``."""
    known = {_key(row) for row in results(label)}
    for point in wanted:
        if _key(asdict(point)) in known and not again:
            continue
        row = {"label": label, **measure(point)}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def results(label: str) -> list[dict[str, Any]]:
    """The newest row of each point."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return [*{_key(row): row for row in rows if row["label"] == label}.values()]


def _key(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["nodes"], row["latency_s"], row["link"], row["seed"]
