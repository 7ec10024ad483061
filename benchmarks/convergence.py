"""Which settings win: one table for each choice, the same seeds in every row.

``python -m benchmarks convergence [TABLE …]`` runs what is missing in ``results/convergence.jsonl`` and goes on where
it was stopped; RESULTS.md is made from that file.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.simulated import Experiment, average_gradients, run

RESULTS = Path(__file__).parent / "results" / "convergence.jsonl"
SEEDS = (0, 1, 2)
Precision = Literal["bf16", "fp32"]
SLOW_NODE, SLOW_NODES = (1.0, 0.5), (1.0, 0.5, 0.25)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One choice: what stands in each row, and what is to be learned from it."""

    question: str
    rows: Mapping[str, Experiment | Precision]
    """By their names in the table; a precision alone is the averaging of gradients in it."""


def _with(**settings: Any) -> Experiment:
    """Two equal nodes; ``late_steps``, ``speeds`` and the like go to the experiment, all else to the algorithm."""
    own = {name: settings.pop(name) for name in [*settings] if name in Experiment.__dataclass_fields__ and name != "settings"}
    return Experiment(settings=settings, **own)


def _outer(lr: float, momentum: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"lr": lr, "momentum": momentum, **more}


TABLES: dict[str, Table] = {
    "reference": Table(
        question="What the same tokens give with gradients averaged at each step, and in cycles of 20 steps.",
        rows={
            "gradients averaged each step": "bf16",
            "gradients averaged each step, fp32 arithmetic": "fp32",
            "LocalSGD: waits for each commit": _with(algorithm="LocalSGD"),
            "LocalSGD, fp32 arithmetic": _with(algorithm="LocalSGD", precision="fp32"),
            "DecoupledDiLoCo": _with(),
            "DiLoCo 0.7/0.9: waits for each commit": _with(algorithm="DiLoCo"),
        },
    ),
    "adoption": Table(
        question="How to adopt a commit, by how many steps it comes late.",
        rows={
            "rebase": _with(adoption="rebase"),
            "overwrite": _with(adoption="overwrite"),
            "mix": _with(adoption="mix"),
            "rebase, polls of 0.1 s": _with(adoption="rebase", poll_s=0.1),
            "overwrite, polls of 0.1 s": _with(adoption="overwrite", poll_s=0.1),
        }
        | {
            f"{rule}, {late:g} steps on its way": _with(adoption=rule, late_steps=late)
            for late, rule in itertools.product((5.0, 10.0, 20.0), ("rebase", "overwrite", "mix"))
        },
    ),
    "together": Table(
        question="Four fragments, each rule of adoption, and what else may help it.",
        rows={
            f"{rule}, 4 fragments{name}": _with(adoption=rule, fragments=4, **settings)
            for name, settings in (
                ("", {}),
                (", outer lr 0.7", {"outer": _outer(0.7)}),
                (", polls of 0.25 s", {"poll_s": 0.25}),
                (", 10 steps on its way", {"late_steps": 10.0}),
            )
            for rule in ("rebase", "overwrite", "mix")
        },
    ),
    "outer": Table(
        question="The outer step: learning rate and Nesterov momentum.",
        rows={
            "lr 1": _with(),
            "lr 0.7": _with(outer=_outer(0.7)),
            "lr 0.85": _with(outer=_outer(0.85)),
            "lr 1.3": _with(outer=_outer(1.3)),
            "lr 1, momentum 0.3": _with(outer=_outer(1.0, 0.3)),
            "lr 0.7, momentum 0.3": _with(outer=_outer(0.7, 0.3)),
            "lr 0.7, momentum 0.5": _with(outer=_outer(0.7, 0.5)),
            "lr 0.4, momentum 0.9": _with(outer=_outer(0.4, 0.9)),
            "lr 0.7, momentum 0.9": _with(outer=_outer(0.7, 0.9)),
            "lr 0.7, momentum 0.9 without warm-up": _with(outer=_outer(0.7, 0.9, warmup=False)),
        },
    ),
    "merge": Table(
        question="Weighted mean or RDA.",
        rows={
            "2 nodes, mean": _with(),
            "2 nodes, RDA": _with(merge="rda"),
            "4 nodes, mean": _with(merge="mean", speeds=(1.0,) * 4),
            "4 nodes, RDA": _with(merge="rda", speeds=(1.0,) * 4),
        },
    ),
    "wire": Table(
        question="The number format of contributions and of commits.",
        rows={
            "fp32, fp32": _with(wire="fp32", commit_wire="fp32"),
            "bf16, bf16": _with(),
            "int8, int8": _with(wire="int8", commit_wire="int8"),
            "int4, bf16": _with(wire="int4"),
            "e3m0, bf16": _with(wire="e3m0"),
            "bf16, int4": _with(commit_wire="int4"),
            "int4, int4": _with(wire="int4", commit_wire="int4"),
            "e3m0, e3m0": _with(wire="e3m0", commit_wire="e3m0"),
            "bf16, bf16 by rebasing": _with(adoption="rebase"),
            "sparse, bf16 by rebasing": _with(adoption="rebase", wire="sparse"),
        },
    ),
    "fragments": Table(
        question="Into how many fragments, each synchronised once a cycle.",
        rows={f"{count}": _with(fragments=count) for count in (1, 2, 4, 8)},
    ),
    "cycle": Table(
        question="Steps of a cycle.",
        rows={f"{steps}": _with(sync_every=steps) for steps in (5, 10, 20, 40)},
    ),
    "called": Table(
        question="Contributions that are called when another node's is there, and how long a round waits.",
        rows={
            f"{name}, {how}": _with(speeds=speeds, **settings)
            for name, speeds in (("1 : 1", (1.0, 1.0)), ("1 : 0.5", SLOW_NODE), ("1 : 0.5 : 0.25", SLOW_NODES))
            for how, settings in (
                ("called", {}),
                ("not called", {"called": False}),
                ("not called, no grace", {"called": False, "grace": 0.0}),
                ("not called, waits for all", {"called": False, "grace": 300.0}),
            )
        },
    ),
    "data": Table(
        question="Nodes that each have a part of the text of their own.",
        rows={
            "2 nodes, mean": _with(own_data=True),
            "2 nodes, RDA": _with(own_data=True, merge="rda"),
            "2 nodes, waits for each commit": _with(own_data=True, algorithm="LocalSGD"),
            "4 nodes, mean": _with(own_data=True, merge="mean", speeds=(1.0,) * 4),
            "4 nodes, RDA": _with(own_data=True, merge="rda", speeds=(1.0,) * 4),
        },
    ),
    "joiner": Table(
        question="A node that joins half-way: over how many steps its learning rate rises, or with the inner optimizer of another.",
        rows={f"{steps} steps": _with(joins_at=0.5, rewarm_steps=steps) for steps in (0, 5, 10, 20)}
        | {"inner optimizer of the first node": _with(joins_at=0.5, warm_start=True)},
    ),
}


def key_of(experiment: Experiment | Precision, seed: int) -> str:
    """What identifies a training in the file of results: all that its outcome depends on."""
    what = experiment if isinstance(experiment, str) else asdict(experiment) | {"settings": experiment.resolved()}
    return _canonical([what, seed])


def _canonical(key: list[Any]) -> str:
    """Without what is as it is by default, so that results outlive a new field of :class:`Experiment`."""
    what, seed = key
    if not isinstance(what, str):
        usual = json.loads(json.dumps(asdict(Experiment())))
        what = {name: value for name, value in json.loads(json.dumps(what)).items() if name == "settings" or value != usual[name]}
    return json.dumps([what, seed], sort_keys=True)


def results() -> dict[str, dict[str, Any]]:
    """What has been measured so far, by :func:`key_of`."""
    if not RESULTS.exists():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {_canonical(json.loads(line["key"])): line for line in lines}


def missing(names: Sequence[str], seeds: Sequence[int], pattern: str = "") -> Iterator[tuple[str, str, int]]:
    """Table, row and seed of what is to be run: seed by seed, so that early figures cover all rows."""
    known = set(results())
    for seed in seeds:
        for name in names:
            for row, experiment in TABLES[name].rows.items():
                key = key_of(experiment, seed)
                if key not in known and re.search(pattern, row):
                    known.add(key)
                    yield name, row, seed


def run_all(names: Sequence[str], seeds: Sequence[int], jobs: int, pattern: str) -> None:
    """Run what is missing, ``jobs`` at a time, each in a process of its own."""
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        raise SystemExit(f"no table {unknown[0]!r}: there are {', '.join(TABLES)}")

    def one(what: tuple[str, str, int]) -> None:
        table, row, seed = what
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks", "train", table, row, str(seed)]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            print(f"{table}, {row}, seed {seed}: failed", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, missing(names or [*TABLES], seeds, pattern)))


def train(table: str, row: str, seed: int) -> None:
    """Run one and append its result to the file."""
    import torch

    torch.set_num_threads(1)
    experiment = TABLES[table].rows[row]
    began, cpu = time.monotonic(), time.process_time()
    outcome = average_gradients(seed, precision=experiment) if isinstance(experiment, str) else run(experiment, seed)
    outcome |= {"wall_s": round(time.monotonic() - began, 1), "cpu_s": round(time.process_time() - cpu, 1)}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"table": table, "row": row, "seed": seed, **outcome, "key": key_of(experiment, seed)}) + "\n")
    print(f"{table:>10}  {row:<44} seed {seed}  {outcome['loss']:.4f}  ({outcome['wall_s']:.0f} s)", flush=True)
