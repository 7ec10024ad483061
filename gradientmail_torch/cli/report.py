"""``gradientmail report``: a run as one HTML page that needs no network, no scripts and no server.

Times are those that the learners' own clocks said, which is good enough for a picture and for nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from gradientmail_torch.cli import formats
from gradientmail_torch.cli.cost import cost
from gradientmail_torch.cli.logs import Curve
from gradientmail_torch.cli.pictures import last_moment, log_pictures, run_pictures, timescale
from gradientmail_torch.cli.prices import PriceTable
from gradientmail_torch.cli.replay import Replayed, Total, replay, totals
from gradientmail_torch.cli.run_view import LifeView, RunView


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What the page says of a learner."""

    learner_id: str
    lives: int
    state: str
    steps: int
    samples: int
    contributions: int
    merged: int
    goodput: float | None
    """Part of the steps of its newest life that is in commits; None when that is not known."""
    stall: float | None
    staleness_steps: int
    up: str
    down: str
    requests: int


def report(view: RunView, prices: PriceTable, logs: Mapping[str, Mapping[str, Curve]], *, now: float) -> str:
    """The page for a view with its history."""
    commits = replay(view)
    sums = totals(commits, len(view.fragments))
    scale = timescale(view, commits)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": formats.size, "count": formats.count, "dollars": formats.dollars, "duration": formats.duration}
    template = environment.from_string(files("gradientmail_torch.cli").joinpath("report.html.j2").read_text())
    return template.render(
        view=view,
        made=_date(now),
        founded=_date(view.manifest.founded_at),
        lasted=last_moment(view, commits) - scale.begin,
        commits=commits,
        rows=[_row(life, view, commits, sums) for life in view.learners],
        pictures=[*run_pictures(view, commits, scale), *log_pictures(logs)],
        cost=cost(view, prices),
        left_out=[(commit, refused) for commit in commits for refused in commit.left_out],
        total=_committed(sums),
    )


def _committed(sums: Sequence[Total]) -> dict[str, float]:
    return {"samples": sum(each.samples for each in sums), "contributions": sum(each.contributions for each in sums)}


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (ValueError, OverflowError):  # a clock that is no clock
        return "an unknown date"


def _row(life: LifeView, view: RunView, commits: Sequence[Replayed], sums: Sequence[Total]) -> Row:
    total = next((each for each in sums if each.learner_id == life.learner_id), None)
    beat = life.beat
    this_life = (life.learner_id, life.generation)
    own = [each for commit in commits for each in commit.contributions if (each.learner_id, each.generation) == this_life]
    committed = sum(each.steps for each in own) / len(view.fragments)
    return Row(
        learner_id=life.learner_id,
        lives=life.generation,
        state=beat.state if beat else "",
        steps=beat.steps if beat else 0,
        samples=beat.samples if beat else 0,
        contributions=total.contributions if total else 0,
        merged=total.merged if total else 0,
        goodput=min(1.0, committed / beat.steps) if beat and beat.steps else None,
        stall=beat.stall_seconds / beat.seconds if beat and beat.seconds else None,
        staleness_steps=beat.staleness_steps if beat else 0,
        up=formats.size(beat.bytes_up) if beat else "",
        down=formats.size(beat.bytes_down) if beat else "",
        requests=sum(beat.requests.values()) if beat else 0,
    )
