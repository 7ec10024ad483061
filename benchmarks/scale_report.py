"""The table and the picture of docs/scale.md, from what has been measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import table
from benchmarks.scale import LATENCIES_S, LINKS, NODES, results

DOCUMENT = Path(__file__).parents[1] / "docs" / "scale.md"
PICTURE = DOCUMENT.parent / "images" / "scale.png"
LINK_NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


def write() -> None:
    """The tables in the document, between the marks ``<!-- begin LABEL -->`` and ``<!-- end -->``, and the picture."""

    def filled(found: re.Match[str]) -> str:
        return f"<!-- begin {found[1]} -->\n\n{markdown(found[1])}\n\n<!-- end -->"

    DOCUMENT.write_text(re.sub(r"<!-- begin (\w+) -->\n.*?<!-- end -->", filled, DOCUMENT.read_text(), flags=re.DOTALL))
    plot()


def markdown(label: str) -> str:
    rows = sorted(results(label), key=lambda row: (LINKS[row["link"]], row["latency_s"], row["nodes"]))
    head = [
        "link, latency, H", "nodes", "writes", "reads", "$ for them", "GB up", "GB down", "$ with traffic, AWS", "R2",
        "till committed, s", "till adopted, s", "busiest merges, GB a cycle",
    ]  # fmt: skip
    return table(head, map(_cells, rows))


def _cells(row: Mapping[str, Any]) -> list[object]:
    dollars = row["dollars"]
    return [
        f"{LINK_NAMES[row['link']]}, {row['latency_s'] * 1000:.0f} ms, {row['sync_every']}",
        f"{row['nodes']:,}",
        f"{row['writes']:,}",
        f"{row['reads']:,}",
        f"{row['dollars_requests']['aws']:.3f}",
        f"{row['gb_up']:.0f}",
        f"{row['gb_down']:.0f}",
        f"{dollars['aws']:.2f}",
        f"{dollars['r2']:.3f}",
        row["commit_s"],
        row["adopt_s"],
        row["merge_gb_per_cycle"],
    ]


FIGURES: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "dollars a node-hour for requests (AWS)": lambda row: row["dollars_requests"]["aws"],
    "seconds from the first contribution to adoption": lambda row: row["adopt_s"],
    "GB that the busiest node merges a cycle": lambda row: row["merge_gb_per_cycle"],
}


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(FIGURES), figsize=(12, 3.6), layout="constrained")
    for axis, (title, of) in zip(axes, FIGURES.items(), strict=True):
        for label, style in (("before", "--"), ("now", "-")):
            for link, colour in zip(LINKS, ("#ee6677", "#4477aa", "#228833"), strict=True):
                rows = [row for row in results(label) if row["link"] == link and row["latency_s"] == LATENCIES_S[0]]
                line = sorted((row["nodes"], of(row)) for row in rows)
                if line:
                    name = f"{LINK_NAMES[link]}, {label}"
                    axis.plot(*zip(*line, strict=True), style, marker="o", markersize=3, color=colour, label=name)
        axis.set_xscale("log", base=4)
        axis.set_xticks(NODES, [f"{n:,}" for n in NODES])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("nodes")
        axis.set_title(title, fontsize="small")
    axes[0].legend(fontsize="x-small")
    figure.savefig(PICTURE, dpi=130)
    pyplot.close(figure)
