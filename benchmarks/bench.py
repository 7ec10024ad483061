"""All races, one after the other, each when the machine is quiet; what has been run already is not run again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import figures, link, machine
from benchmarks.methods import METHODS
from benchmarks.race import Plan, start

RESULTS = Path(__file__).parent / "results" / "races.jsonl"
LIMIT_S = 1800.0
PACE_STEPS = 100
"""Of the races that only a rate is taken from."""
LOSS_STEPS = 300
"""614,400 tokens over all nodes."""
TOKENS_A_STEP = 2048
"""Of all nodes together."""

PACED = {
    "unlimited": ("bound", "alone", "ddp", "postlocal", "torchft", "hivemind", "ours", "ours-best", "bound-4", "ours-4"),
    "100mbit": ("bound", "torchft", "ours", "ours-best"),
    "10mbit": ("bound", "torchft", "ours", "ours-best"),
}
OURS = ("ours", "ours-best", "ours-0.7/0.9", "ours-0.7/0.9-overwrite", "ours-0.7/0.9-warmup", "ours-4")
JUDGED = (*OURS, "ddp", "torchft", "postlocal", "hivemind")
"""Whose loss is taken, for three seeds, over the unlimited link."""
INCIDENTS = {
    "join": ("torchft", "ours", "hivemind"),
    "kill": ("ddp", "torchft", "ours", "hivemind"),
    "freeze": ("torchft", "ours"),
    "outage": ("torchft", "ours"),
}


def plans(parts: list[str]) -> Iterator[Plan]:
    wanted = parts or ["pace", "loss", "incidents", "clock"]
    if "pace" in wanted:
        for where, methods in PACED.items():
            for method in methods:
                # The bound does not use the link, but is run beside those that do: a machine's speed changes.
                yield Plan(method=method, link=where, steps=PACE_STEPS)
    if "loss" in wanted:
        for seed in (0, 1, 2):
            for method in JUDGED:
                yield Plan(method=method, steps=LOSS_STEPS, seed=seed)
    if "incidents" in wanted:
        for scenario, methods in INCIDENTS.items():
            for method in methods:
                yield Plan(method=method, scenario=scenario)
    if "clock" in wanted:
        yield from _at_equal_time()


def _at_equal_time(where: str = "100mbit") -> Iterator[Plan]:
    """Torchft's whole training over a slow link, and ours with as many steps as fit into its time by the rate measured."""
    yield Plan(method="torchft", link=where, steps=LOSS_STEPS)
    known = {(found["method"], found["steps"]): found for found in results() if found["link"] == where}
    whole, paced = known.get(("torchft", LOSS_STEPS), {}), known.get(("ours", PACE_STEPS), {})
    if "train_s" in whole and paced.get("tokens_per_s"):
        yield Plan(method="ours", link=where, steps=int(whole["train_s"] * paced["tokens_per_s"] / TOKENS_A_STEP))


def run(parts: list[str], *, patience_s: float, again: bool) -> None:
    done = set() if again else {_key(found) for found in results()}
    unable = {name: reason for name in METHODS if (reason := METHODS[name].missing())}
    for name, reason in unable.items():
        print(f"{name} is left out: {reason}")
    isolation = link.can_isolate()
    for plan in plans(parts):
        if plan.method in unable or _key(vars_of(plan)) in done:
            continue
        if isolation and link.LINKS[plan.link]:
            print(f"{plan.name} is left out: {isolation}")
            continue
        quiet = machine.wait_until_quiet(patience_s)
        try:
            start(plan, LIMIT_S)
            found = figures.of(plan.directory)
        except (SystemExit, OSError, ValueError) as error:
            print(f"{plan.name}: {error}")
            continue
        add(found | {"quiet": quiet, "revision": machine.revision()})
        print(
            f"{plan.name}: {found.get('tokens_per_s')} tokens/s, loss {found.get('loss')}, others used {found.get('other_cores')} cores",
            flush=True,
        )


def vars_of(plan: Plan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in _KEY}


def results() -> list[dict[str, Any]]:
    """The newest figures of each race."""
    if not RESULTS.exists():
        return []
    newest = {_key(found): found for found in map(json.loads, RESULTS.read_text().splitlines())}
    return [*newest.values()]


def add(found: dict[str, Any]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(found) + "\n")


_KEY = ("method", "link", "scenario", "steps", "seed")


def _key(found: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(found[name] for name in _KEY)
