"""A soak in figures, in words and in a picture."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.chaos.schedule import NODE_KINDS
from tests.chaos.soak import Outcome

WINDOW_S = 10.0


def useful_rate(outcome: Outcome) -> float:
    """Samples a second whose progress is in the model at the end."""
    return outcome.ledger.useful_samples / (outcome.stopped - outcome.began)


def figures(outcome: Outcome, quiet: Outcome | None) -> dict[str, Any]:
    ledger = outcome.ledger
    times = [commit.at for commit in ledger.commits]
    kills = [each for each in outcome.happened if each.incident.kind == "kill"]
    waits = [min((at - kill.began for at in times if at > kill.began), default=float("nan")) for kill in kills]
    closed = [life for life in outcome.lives if life.end]
    lost = [life for life in outcome.lives if not life.end]
    rate, quiet_rate = useful_rate(outcome), useful_rate(quiet) if quiet is not None else None
    return {
        "plan": asdict(outcome.plan),
        "seconds": round(outcome.stopped - outcome.began, 1),
        "incidents": [{**asdict(each.incident), "took_s": round(each.ended - each.began, 1)} for each in outcome.happened],
        "lives": len(outcome.lives),
        "useful_samples_per_s": round(rate, 1),
        "quiet_samples_per_s": None if quiet_rate is None else round(quiet_rate, 1),
        "goodput": None if quiet_rate is None else round(rate / quiet_rate, 3),
        "commits": len(times),
        "longest_without_commit_s": round(max((b - a for a, b in pairwise(times)), default=0.0), 1),
        "takeovers_of_rounds": outcome.takeovers,
        "takeovers_of_names": sum(life.generation > 1 for life in outcome.lives),
        "kill_to_next_commit_s": [round(wait, 2) for wait in waits],
        "discarded_samples": sum(life.end["stats"]["tally"]["discarded_work"]["samples"] for life in closed if life.end) / ledger.fragments,
        "samples_lost_with_nodes": sum(
            max(0.0, life.samples - ledger.merged_samples[life.name, life.generation] / ledger.fragments) for life in lost
        ),
        "left_out": dict(ledger.left_out()),
        "equal": len({life.end["digest"] for life in closed if life.end}) == 1,
        "ended_by": [f"{life.name}/{life.generation}: {life.ended_by}" for life in outcome.lives if life.ended_by],
        "notes": outcome.notes,
        "problems": outcome.problems,
    }


def text(found: dict[str, Any]) -> str:
    plan, waits, kinds = found["plan"], found["kill_to_next_commit_s"], [each["kind"] for each in found["incidents"]]
    told = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)) or "nothing went wrong"
    goodput = f" ({100 * found['goodput']:.0f} % of the {found['quiet_samples_per_s']} of a quiet run)" if found["goodput"] else ""
    waited = (
        f"{statistics.median(waits):.1f} s in the median, at most {max(waits):.1f} s, of {len(waits)}" if waits else "nobody was killed"
    )
    rows = {
        "useful samples/s": f"{found['useful_samples_per_s']}{goodput}",
        "commits": f"{found['commits']}, the longest time without one {found['longest_without_commit_s']} s",
        "takeovers": f"{found['takeovers_of_rounds']} of rounds, {found['takeovers_of_names']} of names by {found['lives']} lives",
        "from kill to next commit": waited,
        "samples discarded": f"{found['discarded_samples']:.0f}; lost with nodes {found['samples_lost_with_nodes']:.0f}",
        "contributions left out": found["left_out"] or "none",
        "models at the end": "equal to the last bit" if found["equal"] else "DIFFERENT",
        "problems": "none" if not found["problems"] else len(found["problems"]),
    }
    return "\n".join(
        [
            f"Chaos on {plan['store']}, seed {plan['seed']}, {plan['nodes']} nodes, {found['seconds']:.0f} s: {told}",
            *(f"  {name:26}{value}" for name, value in rows.items()),
            *(f"  {'note':26}{note}" for note in found["notes"]),
            *(f"  {'ended early':26}{life[:160]}" for life in found["ended_by"]),
            *(f"  {'PROBLEM':26}{problem}" for problem in found["problems"]),
        ]
    )


def write(outcome: Outcome, quiet: Outcome | None, directory: Path) -> dict[str, Any]:
    found = figures(outcome, quiet)
    (directory / "report.json").write_text(json.dumps(found, indent=1))
    (directory / "report.txt").write_text(text(found) + "\n")
    draw(outcome, quiet, directory / "report.png")
    return found


_COLOURS = {"outage": "tab:red", "failing": "tab:orange", "slow": "tab:olive", "server restart": "tab:purple", "full disk": "tab:brown"}


def draw(outcome: Outcome, quiet: Outcome | None, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (nodes, versions, rate) = plt.subplots(3, 1, figsize=(12, 8), sharex=True, layout="constrained", height_ratios=[2, 1, 1.3])
    end = outcome.stopped - outcome.began
    names = outcome.plan.names
    for life in outcome.lives:
        steps = [event["at"] - outcome.began for event in life.events if event["event"] == "step"]
        if steps:
            row = names.index(life.name)
            nodes.plot(steps, [row] * len(steps), "|", color="tab:blue", markersize=9, alpha=0.35)
    for each in outcome.happened:
        begin, over, kind = each.began - outcome.began, each.ended - outcome.began, each.incident.kind
        if kind in NODE_KINDS:
            row = names.index(each.incident.node)
            nodes.plot([begin, over], [row - 0.32] * 2, color={"kill": "black", "suspend": "tab:gray", "usurp": "tab:pink"}[kind], lw=4)
            nodes.annotate(kind, (begin, row - 0.42), fontsize=7, va="top")
        else:
            for axis in (nodes, versions, rate):
                axis.axvspan(begin, over, color=_COLOURS[kind], alpha=0.18, lw=0)
            nodes.annotate(kind, (begin, len(names) - 0.45), fontsize=7, color=_COLOURS[kind])
    nodes.set(yticks=range(len(names)), yticklabels=names, ylim=(-0.8, len(names) - 0.2), title="Steps, and what went wrong")
    for fragment in range(outcome.ledger.fragments):
        commits = [commit for commit in outcome.ledger.commits if commit.fragment == fragment]
        versions.step([c.at - outcome.began for c in commits], [c.version for c in commits], where="post", label=f"fragment {fragment}")
    versions.set(ylabel="version")
    versions.legend(fontsize=8)
    rate.plot(*_rate(outcome, end), label="with incidents")
    if quiet is not None:
        rate.axhline(useful_rate(quiet), ls="--", color="tab:gray", label="a quiet run")
    rate.set(xlim=(0, end), ylim=(0, None), xlabel="seconds", ylabel=f"committed samples/s, mean of {WINDOW_S:.0f} s")
    rate.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _rate(outcome: Outcome, end: float) -> tuple[list[float], list[float]]:
    commits = [(c.at - outcome.began, sum(m.samples for m in c.merged) / outcome.ledger.fragments) for c in outcome.ledger.commits]
    at = [float(second) for second in range(int(WINDOW_S), int(end) + 1)]
    return at, [sum(samples for when, samples in commits if second - WINDOW_S < when <= second) / WINDOW_S for second in at]
