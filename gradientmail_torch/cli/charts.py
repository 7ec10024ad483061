"""Pictures for the report: SVG that takes its ink from the page, so that it reads in dark and in light."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#3b82f6", "#f97316", "#10b981", "#e11d48", "#a855f7", "#ca8a04", "#06b6d4", "#84cc16", "#f472b6", "#64748b")
"""Legible on white and on near-black."""
_INK, _LINE = "#010203", "#010204"  # replaced by the page's own
_GROUPS = "figure|axes|patch|matplotlib|text|line2d|xtick|ytick|legend|Path|LineCollection|FillBetween|PolyCollection"
_RC = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gradientmail",
    "font.size": 10.5,
    "text.parse_math": False,  # names come from the mailbox
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.5,
}
MOST_NAMED = 10
"""More series than this have no legend."""

LEGEND_LETTERS = 60
"""As many fit into a line above a picture."""

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time during which a learner was there."""

    row: str
    begin: float
    end: float
    marks: Sequence[float] = ()
    """When something of it was committed."""


def timeline(spans: Sequence[Span], *, x: str) -> str:
    """One row for each name, a bar for each span."""
    rows = [*dict.fromkeys(span.row for span in spans)]

    def draw(axes: Axes) -> None:
        for span in spans:
            place, colour = rows.index(span.row), _colour(rows.index(span.row))
            axes.barh(place, max(span.end - span.begin, 1e-9), left=span.begin, height=0.5, color=colour, alpha=0.35)
            axes.plot(span.marks, [place] * len(span.marks), "|", color=colour, markersize=11)
        axes.set_yticks(range(len(rows)), [_short(row) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(x)
        axes.grid(visible=False, axis="y")

    return _svg(draw, height=1.0 + 0.34 * max(2, len(rows)))


def lines(series: Series, *, x: str, y: str, steps: bool = False, smooth: int = 1) -> str:
    """A line for each series; ``smooth`` takes the mean of so many points."""

    def draw(axes: Axes) -> None:
        for place, (name, points) in enumerate(series.items()):
            xs, ys = _pieces(points, smooth)
            drawn = "steps-post" if steps else "default"
            axes.plot(xs, ys, color=_colour(place), label=_short(name), marker="o" if len(points) < 25 else "", drawstyle=drawn)
        axes.set(xlabel=x, ylabel=y)
        _legend(axes, len(series))

    return _svg(draw)


def dots(series: Series, *, x: str, y: str) -> str:
    """Dots for each series, over whole numbers."""
    beside = 0.5 / max(2, len(series))  # so that dots at one place are all seen

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        for place, (name, points) in enumerate(series.items()):
            shift = beside * (place - (len(series) - 1) / 2)
            axes.plot([p[0] for p in points], [p[1] + shift for p in points], "o", color=_colour(place), label=_short(name), alpha=0.8)
        axes.set(xlabel=x, ylabel=y)
        heights = [y for points in series.values() for _, y in points]
        axes.set_ylim(min(heights, default=0) - 0.7, max(heights, default=0) + 0.7)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _legend(axes, len(series))

    return _svg(draw)


def areas(series: Series, *, x: str, y: str) -> str:
    """Sums that pile up. All series have the same places."""

    def draw(axes: Axes) -> None:
        xs = [p[0] for p in next(iter(series.values()), ())]
        heights = [[p[1] for p in points] for points in series.values()]
        axes.stackplot(xs, heights, labels=[_short(name) for name in series], colors=[_colour(i) for i in range(len(series))], alpha=0.8)
        axes.set(xlabel=x, ylabel=y)
        _legend(axes, len(series))

    return _svg(draw)


def bars(names: Sequence[str], values: Mapping[str, Sequence[float]], *, x: str) -> str:
    """For each name a bar of each kind of value."""

    def draw(axes: Axes) -> None:
        thickness = 0.8 / max(1, len(values))
        for place, (kind, numbers) in enumerate(values.items()):
            places = [row + (place - (len(values) - 1) / 2) * thickness for row in range(len(names))]
            axes.barh(places, numbers, thickness, label=kind, color=_colour(place))
        axes.set_yticks(range(len(names)), [_short(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel(x)
        axes.grid(visible=False, axis="y")
        _legend(axes, len(values))

    return _svg(draw, height=1.0 + 0.42 * max(2, len(names)))


def _svg(draw: Callable[[Axes], None], *, height: float = 2.7) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_RC):  # type: ignore[arg-type]
        figure = Figure(figsize=(5.2, height), layout="constrained")
        draw(figure.subplots())
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    found = text.getvalue()
    found = found[found.index("<svg") :].replace(_INK, "currentColor").replace(_LINE, "var(--line)")
    found = re.sub(rf' id="(?:{_GROUPS})[^"]*"', "", found)  # several pictures share a page, where a name must be one's own
    found = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", found))  # the page gives the size
    return re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.S)


def _legend(axes: Axes, count: int) -> None:
    if 1 < count <= MOST_NAMED:
        longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
        axes.figure.legend(loc="outside upper left", ncols=max(1, min(count, LEGEND_LETTERS // (longest + 6))))


def _pieces(points: Sequence[Point], smooth: int) -> tuple[list[float], list[float]]:
    """Places and means of each piece of a curve; a log that goes back to an earlier step begins a new piece."""
    xs: list[float] = []
    ys: list[float] = []
    start = 0
    for place, (x, _) in enumerate(points):
        if place and x < points[place - 1][0]:
            xs, ys, start = [*xs, math.nan], [*ys, math.nan], place
        window = [y for _, y in points[max(start, place - smooth + 1) : place + 1]]
        xs.append(x)
        ys.append(sum(window) / len(window))
    return xs, ys


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:10] + "…" + name[-11:]
