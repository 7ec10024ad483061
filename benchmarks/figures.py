"""From the events of a race to its figures: pure reading, so that old races can be read again."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]

SETTLING_STEPS = 5
"""First steps of each node that no rate is taken from."""
DOLLARS = {"put": 5e-6, "list": 5e-6, "get": 4e-7, "delete": 0.0}
"""A request at AWS's prices (us-east-1)."""
DOLLARS_PER_GB_OUT = 0.09
"""To the internet; nodes inside of the region, and other stores (Cloudflare R2), pay nothing."""


def of(directory: Path) -> dict[str, Any]:
    """All figures of the race in ``directory``. A figure that its method or scenario does not have is left out."""
    race = read(directory / "race.jsonl")
    nodes = [read(path) for path in sorted(directory.glob("node-*.jsonl"))]
    plan = next(event for event in race if event["event"] == "plan")
    found: dict[str, Any] = {name: plan[name] for name in ("method", "link", "scenario", "steps", "seed")}
    found["exits"] = [event["code"] for event in race if event["event"] == "exited"]
    steps = [[event for event in node if event["event"] == "step"] for node in nodes]
    if not steps or not all(len(of_node) > SETTLING_STEPS for of_node in steps):
        return found | {"failed": "no steps"}
    found |= _pace(steps, race)
    found |= _losses(nodes)
    found["curve"] = _curve(steps)
    found |= _traffic(steps, nodes)
    found |= _starts(nodes, race)
    if plan["scenario"] != "steady":
        found |= _incident(steps, nodes, race)
    return found


def read(path: Path) -> list[Event]:
    """The whole lines of a file of events: a killed process may leave half a one."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]


def _pace(steps: Sequence[Sequence[Event]], race: Sequence[Event]) -> dict[str, Any]:
    """While all nodes are training: from the last one's settling to the first one's end."""
    begin = max(of_node[SETTLING_STEPS - 1]["at"] for of_node in steps)
    end = min(of_node[-1]["at"] for of_node in steps)
    inside = [event for of_node in steps for event in of_node if begin < event["at"] <= end]
    if end <= begin:
        return {}
    lengths = [now["at"] - before["at"] for of_node in steps for before, now in pairwise(of_node) if before["at"] >= begin]
    # What is not forward, backward and a plain optimizer step is the method's.
    plain = statistics.median(event["optimizer_s"] for event in inside)
    lost = sorted(max(0.0, event["optimizer_s"] - plain) + event["method_s"] for event in inside)
    samples = [event for event in race if event["event"] == "sample" and begin < event["at"] <= end]
    return {
        "tokens_per_s": round(sum(event["tokens"] for event in inside) / (end - begin)),
        "train_s": round(max(of_node[-1]["at"] for of_node in steps) - min(of_node[0]["at"] for of_node in steps), 1),
        "step_s": {"p50": round(statistics.median(lengths), 4), "p99": round(_percentile(lengths, 0.99), 4)},
        "compute_s": round(statistics.median(event["compute_s"] for event in inside), 4),
        "method_ms": {"mean": _ms(statistics.fmean(lost)), "p50": _ms(_percentile(lost, 0.5)), "p99": _ms(_percentile(lost, 0.99))},
        "other_cores": round(statistics.fmean([s["other_cores"] for s in samples] or [0.0]), 2),
        "cpu_s_per_step": [round((of_node[-1]["cpu_s"] - of_node[0]["cpu_s"]) / (len(of_node) - 1), 4) for of_node in steps],
        "carried_mb_per_step": _carried(samples, steps, begin, end),
    }


def _carried(samples: Sequence[Event], steps: Sequence[Sequence[Event]], begin: float, end: float) -> float | None:
    """Megabytes on the link per global step."""
    if len(samples) < 2:
        return None
    first, last = samples[0], samples[-1]
    done = statistics.fmean(sum(first["at"] < event["at"] <= last["at"] for event in of_node) for of_node in steps)
    return round((last["carried"] - first["carried"]) / done / 1e6, 3) if done else None


def _losses(nodes: Sequence[Sequence[Event]]) -> dict[str, Any]:
    found = [event["loss"] for node in nodes for event in node if event["event"] == "validated"]
    return {"loss": found[0]} if found else {}


def _curve(steps: Sequence[Sequence[Event]], points: int = 30) -> list[list[float]]:
    """Seconds since the first step, tokens of all nodes, and the mean training loss of the steps since the last point."""
    done = sorted((event for of_node in steps for event in of_node), key=lambda event: event["at"])
    size = max(1, len(done) // points)
    found, tokens = [], 0
    for position in range(0, len(done) - size + 1, size):
        part = done[position : position + size]
        tokens += sum(event["tokens"] for event in part)
        found.append([round(part[-1]["at"] - done[0]["at"], 1), tokens, round(statistics.fmean(event["loss"] for event in part), 3)])
    return found


def _traffic(steps: Sequence[Sequence[Event]], nodes: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """What a method that counts its requests has cost, per global step and per node-hour."""
    if "requests" not in steps[0][-1]:
        return {}
    spans = [(of_node[SETTLING_STEPS], of_node[-1]) for of_node in steps]
    done = statistics.fmean(last["step"] - first["step"] for first, last in spans)
    hours = sum(last["at"] - first["at"] for first, last in spans) / 3600
    requests = {name: sum(last["requests"].get(name, 0) - first["requests"].get(name, 0) for first, last in spans) for name in DOLLARS}
    down = sum(last["down"] - first["down"] for first, last in spans)
    return {
        "up_mb_per_step": round(sum(last["up"] - first["up"] for first, last in spans) / done / 1e6, 3),
        "down_mb_per_step": round(down / done / 1e6, 3),
        "requests_per_node_hour": {name: round(count / hours) for name, count in requests.items()},
        "dollars_per_node_hour": round(sum(DOLLARS[name] * count for name, count in requests.items()) / hours, 4),
        "egress_dollars_per_node_hour": round(down / 1e9 * DOLLARS_PER_GB_OUT / hours, 4),
        "stall_ms": {
            "p50": _ms(_percentile([event["stall_s"] for of_node in steps for event in of_node], 0.5)),
            "p99": _ms(_percentile([event["stall_s"] for of_node in steps for event in of_node], 0.99)),
            "longest": _ms(max(event["stall_s"] for of_node in steps for event in of_node)),
        },
        "commits": max(event["version"] for of_node in steps for event in of_node),
        "discarded_steps": sum(event["discarded"] for node in nodes for event in node if event["event"] == "closed"),
    }


def _starts(nodes: Sequence[Sequence[Event]], race: Sequence[Event]) -> dict[str, Any]:
    """From a process's launch to its first step, by node; of the last life, where there were several."""
    found = []
    for number, node in enumerate(nodes):
        launched = [event["at"] for event in race if event["event"] == "launched" and event["node"] == number][-1]
        life = [event for event in node if event["at"] >= launched]
        first = next((event["at"] for event in life if event["event"] == "step"), None)
        found.append(round(first - launched, 2) if first is not None else None)
    return {"first_step_s": found}


def _incident(steps: Sequence[Sequence[Event]], nodes: Sequence[Sequence[Event]], race: Sequence[Event]) -> dict[str, Any]:
    """What the first node saw of what happened, and how the last one came (back)."""
    marks = {event["event"]: event["at"] for event in race if event["event"] in ("killed", "frozen", "thawed", "outage", "restored")}
    launches = [event for event in race if event["event"] == "launched" and event["latecomer"]]
    begin = min([*marks.values(), *(event["at"] for event in launches)], default=None)
    if begin is None:
        return {"failed": "nothing happened"}
    survivor = steps[0]
    gaps = [(now["at"] - before["at"], now["at"]) for before, now in pairwise(survivor)]
    usual = statistics.median(gap for gap, at in gaps if at < begin)
    found: dict[str, Any] = {
        "survivor_step_s": {
            "usual": round(usual, 3),
            "longest_before": _longest(gaps, 0, begin),
            "longest_after": _longest(gaps, begin, 1e18),
        },
        "survivor_steps_after": sum(event["at"] > begin for event in survivor),
    }
    versions = [(event["version"], event["at"]) for event in survivor if "version" in event]
    at_begin = max((version for version, at in versions if at <= begin), default=0)
    following = next((at for version, at in versions if at > begin and version > at_begin), None)
    found["next_commit_s"] = round(following - begin, 2) if following is not None else None
    if launches:
        found["arrival"] = _arrival(nodes[launches[-1]["node"]], launches[-1]["at"])
    return found


def _arrival(node: Sequence[Event], launched: float) -> dict[str, Any]:
    life = [event for event in node if event["at"] >= launched]
    events = {name: next((event for event in life if event["event"] == name), None) for name in ("joined", "healed", "ready", "step")}
    found: dict[str, Any] = {f"{name}_s": round(event["at"] - launched, 2) for name, event in events.items() if event is not None}
    joint = next((event["at"] for event in life if event["event"] == "step" and event.get("merged", 0) > 0), None)
    if joint is not None:
        found["joint_commit_s"] = round(joint - launched, 2)
    if events["joined"] is not None:
        found["joiner_down_mb"] = round(events["joined"]["bytes_down"] / 1e6, 2)
    return found


def _longest(gaps: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    return round(max((gap for gap, at in gaps if begin < at <= end), default=0.0), 3)


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
