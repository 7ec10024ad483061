"""What a campaign spent its time on: a table, a summary, a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from statistics import median

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.patterns.steering.overhead import Overhead
from gradientmail_torch.patterns.steering.result import Result

_PARTS = ("queues", "server", "engine", "serialization", "running", "worker")
_COLUMNS = ("total", *_PARTS)


def overhead_table(results: Iterable[Result]) -> str:
    """A line for each result: where its time went, in milliseconds. ``-`` where a mark is missing.

    ``to server`` and ``to thinker`` are single ways and contain the skew of two clocks; nothing else does.
    """
    header = ("task", "method", "ok", *_COLUMNS, "efficiency", "to server~", "to thinker~")
    rows = []
    for result in results:
        parts = result.overhead()
        times = [_milliseconds(getattr(parts, f"{name}_s")) for name in _COLUMNS]
        ways = [_milliseconds(parts.one_way.to_server_s), _milliseconds(parts.one_way.to_thinker_s)]
        ok = "-" if result.success is None else "yes" if result.success else "no"
        rows.append((result.task_id[:8], result.method or "-", ok, *times, _percent(parts.efficiency), *ways))
    return f"{_aligned([header, *rows])}\nTimes in ms; ~ contains the skew between two machines' clocks."


def overhead_summary(results: Iterable[Result]) -> str:
    """Median and 95th percentile of each part over all results whose marks are complete, in milliseconds."""
    found = [parts for parts in (result.overhead() for result in results) if _complete(parts)]
    rows: list[tuple[str, ...]] = [("part", "median", "p95", "share of total")]
    whole = sum(parts.total_s or 0.0 for parts in found)
    for name in _COLUMNS:
        values = [getattr(parts, f"{name}_s") for parts in found]
        share = _percent(sum(values) / whole) if whole else "-"
        rows.append((name, _milliseconds(_median(values)), _milliseconds(percentile(values, 95)), share))
    efficiencies = [parts.efficiency for parts in found if parts.efficiency is not None]
    rows.append(("efficiency", _percent(_median(efficiencies)), _percent(percentile(efficiencies, 5)), ""))
    return f"{_aligned(rows)}\n{len(found)} tasks; times in ms. The second figure of efficiency is the 5th percentile."


def plot_overhead(results: Iterable[Result], path: str | os.PathLike[str]) -> None:
    """Write a PNG: each task a bar of its parts. Needs matplotlib (extra ``[demo]``)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'gradientmail-torch[demo]'") from error
    found = [parts for parts in (result.overhead() for result in results) if _complete(parts)]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bottom = [0.0] * len(found)
    for name in ("running", "worker", "serialization", "engine", "server", "queues"):
        heights = [max(0.0, getattr(parts, f"{name}_s")) for parts in found]
        axes.bar(range(len(found)), heights, bottom=bottom, width=1.0, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(xlabel="task, in the order of results", ylabel="seconds", title="Where the time went")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(os.fspath(path), format="png", dpi=120)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` of the values do not exceed; None where there are none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _complete(parts: Overhead) -> bool:
    return all(getattr(parts, f"{name}_s") is not None for name in _COLUMNS)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
