"""Tables and plots from the results, put into RESULTS.md between the marks ``<!-- begin NAME -->`` and ``<!-- end -->``.

What stands around the marks is written by hand.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bench, convergence
from benchmarks.methods import METHODS

HERE = Path(__file__).parent
DOCUMENT = HERE / "RESULTS.md"
PARTS = HERE / "results" / "parts.json"

LINKS = ("unlimited", "100mbit", "10mbit")
Row = Sequence[object]


def write() -> None:
    text = DOCUMENT.read_text()
    races = bench.results()
    blocks: dict[str, Callable[[], str]] = {
        "pace": lambda: pace(races),
        "losses": lambda: losses(races),
        "clock": lambda: clock(races),
        "incidents": lambda: incidents(races),
        "parts": parts,
        **{f"convergence {name}": (lambda name=name: choice(name)) for name in convergence.TABLES},
    }

    def filled(found: re.Match[str]) -> str:
        return f"<!-- begin {found[1]} -->\n{blocks[found[1]]()}\n<!-- end -->"

    DOCUMENT.write_text(re.sub(r"<!-- begin ([\w ]+) -->\n.*?<!-- end -->", filled, text, flags=re.DOTALL))
    plot(races)


def table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join("–" if cell is None else str(cell) for cell in line) + " |" for line in lines)


# --- races ---------------------------------------------------------------------------------------------


def pace(races: Sequence[Mapping[str, Any]]) -> str:
    """A row a method and link; ratios are of the bound over the same link, which was run beside."""
    rows = []
    for where in LINKS:
        steady = [race for race in races if race["link"] == where and race["scenario"] == "steady" and race["steps"] == bench.PACE_STEPS]
        for race in steady:
            rows.append([
                METHODS[race["method"]].title, where, race.get("tokens_per_s"), _of_bound(race, races),
                _pair(race, "method_ms", "p50", "p99"), race.get("up_mb_per_step"), race.get("down_mb_per_step"),
                race.get("carried_mb_per_step"), race.get("dollars_per_node_hour"), race.get("other_cores"),
            ])  # fmt: skip
    head = ["method", "link", "tokens/s", "of the bound", "ms lost a step, p50 / p99", "MB up a step", "MB down a step",
            "MB on the link a step", "$ a node-hour", "cores used by others"]  # fmt: skip
    return table(head, rows)


def _of_bound(race: Mapping[str, Any], races: Sequence[Mapping[str, Any]]) -> str | None:
    name = "bound-4" if METHODS[race["method"]].nodes == 4 else "bound"
    bounds = [each for each in races if each["method"] == name and each["steps"] == race["steps"] and "tokens_per_s" in each]
    same = [each for each in bounds if each["link"] == race["link"]] or bounds
    if not same or "tokens_per_s" not in race or race["method"] == "alone":
        return None
    return f"{race['tokens_per_s'] / same[0]['tokens_per_s']:.2f}"


def losses(races: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    whole = [race for race in races if (race["steps"], race["scenario"], race["link"]) == (bench.LOSS_STEPS, "steady", "unlimited")]
    for method in METHODS:
        found = [race for race in whole if race["method"] == method]
        by_seed = [race["loss"] for race in sorted(found, key=lambda race: race["seed"]) if "loss" in race]
        if by_seed:
            rows.append([METHODS[method].title, f"{statistics.fmean(by_seed):.3f}", ", ".join(f"{loss:.3f}" for loss in by_seed)])
    return table(["method", "validation loss, mean", "by seed"], rows)


def clock(races: Sequence[Mapping[str, Any]]) -> str:
    """Whole trainings over a limited link: tokens, time and loss."""
    found = [race for race in races if race["scenario"] == "steady" and race["link"] != "unlimited" and race["steps"] >= bench.LOSS_STEPS]
    rows = [
        [
            METHODS[race["method"]].title,
            race["link"],
            race.get("train_s"),
            f"{race['steps'] * 2 * 1024:,}",
            race.get("loss"),
            race.get("other_cores"),
        ]
        for race in found
    ]
    return table(["method", "link", "seconds", "tokens", "validation loss", "cores used by others"], rows)


def incidents(races: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for race in races:
        if race["scenario"] == "steady":
            continue
        step, arrival = race.get("survivor_step_s", {}), race.get("arrival", {})
        rows.append([
            race["scenario"], METHODS[race["method"]].title, step.get("usual"), step.get("longest_before"), step.get("longest_after"),
            race.get("survivor_steps_after"), race.get("next_commit_s"), race.get("discarded_steps"), arrival.get("step_s"),
            arrival.get("joint_commit_s"), arrival.get("joiner_down_mb"), race.get("other_cores"),
        ])  # fmt: skip
    head = ["incident", "method", "usual step, s", "longest before, s", "longest after, s", "steps after", "next commit, s",
            "steps discarded", "joiner: first step, s", "first joint commit, s", "first download, MB", "cores used by others"]  # fmt: skip
    return table(head, rows)


def _pair(race: Mapping[str, Any], name: str, *fields: str) -> str | None:
    return " / ".join(f"{race[name][field]:g}" for field in fields) if name in race else None


# --- settings ------------------------------------------------------------------------------------------


def choice(name: str) -> str:
    """The rows of one table of convergence, with the difference to its first row over the seeds that both have."""
    known = convergence.results()
    base: dict[int, float] = {}
    rows = []
    for row, experiment in convergence.TABLES[name].rows.items():
        found = {seed: known.get(convergence.key_of(experiment, seed)) for seed in convergence.SEEDS}
        by_seed = {seed: result["loss"] for seed, result in found.items() if result is not None}
        base = base or by_seed
        if not by_seed:
            continue
        half = [result["losses"]["0.5"] for result in found.values() if result is not None and "0.5" in result["losses"]]
        shared = [by_seed[seed] - base[seed] for seed in by_seed if seed in base]
        nodes = [node for result in found.values() if result is not None for node in result.get("nodes", ())]
        mean = f"**{statistics.fmean(by_seed.values()):.3f}**"
        rows.append([
            row, f"{statistics.fmean(half):.3f}" if half else None, mean, _spread(by_seed.values()),
            f"{statistics.fmean(shared):+.3f}" if shared else None, len(by_seed),
            f"{statistics.fmean(node['late_steps'] for node in nodes):.1f}" if nodes else None,
            round(sum(node["discarded_steps"] for node in nodes) / len(by_seed)) if nodes else None,
        ])  # fmt: skip
    head = ["", "307 k tokens", "614 k tokens", "± over seeds", "to the first row", "seeds", "commits late by, steps", "steps discarded"]
    return f"{convergence.TABLES[name].question}\n\n" + table(head, rows)


def _spread(values: Iterable[float]) -> str | None:
    found = [*values]
    return f"{statistics.stdev(found):.3f}" if len(found) > 1 else None


def parts() -> str:
    found = json.loads(PARTS.read_text()) if PARTS.exists() else {}
    return table(["part", "figures"], [[name, ", ".join(f"{key}: {value}" for key, value in of.items())] for name, of in found.items()])


# --- plots ---------------------------------------------------------------------------------------------

COLOURS = {"bound": "0.6", "ddp": "#4477aa", "torchft": "#ee6677", "hivemind": "#ccbb44", "postlocal": "#66ccee", "ours": "#228833",
           "ours-int4": "#66aa66", "ours-0.7/0.9": "#99cc99"}  # fmt: skip


def plot(races: Sequence[Mapping[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steady = [race for race in races if race["scenario"] == "steady" and "tokens_per_s" in race]
    if not steady:
        return
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    shown = [name for name in COLOURS if any(race["method"] == name and race["steps"] == bench.PACE_STEPS for race in steady)]
    for place, name in enumerate(shown):
        rates = {race["link"]: race["tokens_per_s"] for race in steady if race["method"] == name and race["steps"] == bench.PACE_STEPS}
        at = [LINKS.index(where) + 0.8 * place / len(shown) for where in rates]
        left.bar(at, [*rates.values()], width=0.75 / len(shown), color=COLOURS[name], label=METHODS[name].title)
    left.set_xticks([0.35 + i for i in range(len(LINKS))], ["no limit", "100 Mbit/s", "10 Mbit/s"])
    left.set_ylabel("tokens per second, 2 nodes")
    left.legend(fontsize="x-small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    for name in COLOURS:
        longest = [race for race in steady if race["method"] == name and race["link"] == "100mbit"]
        if longest:
            curve = max(longest, key=lambda race: race["steps"])["curve"]
            right.plot([point[0] for point in curve], [point[2] for point in curve], color=COLOURS[name], label=METHODS[name].title)
    right.set_xlabel("seconds, 100 Mbit/s shared by all")
    right.set_ylabel("training loss")
    right.legend(fontsize="x-small")
    figure.savefig(HERE / "results" / "races.png", dpi=150)
    pyplot.close(figure)
