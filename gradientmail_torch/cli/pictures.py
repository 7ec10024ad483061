"""What the report shows of a run, as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from gradientmail_torch.cli import charts
from gradientmail_torch.cli.logs import Curve, pick
from gradientmail_torch.cli.replay import Replayed
from gradientmail_torch.cli.run_view import RunView

RATE_WINDOWS = 40
"""Places at which the rate of committed samples is taken."""
SMOOTH = 10
"""Points of a training loss that are drawn as their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    title: str
    says: str
    """What is to be seen, for those who do not see it."""
    svg: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class Timescale:
    """Turns times of day into minutes or hours since the run began."""

    begin: float
    unit: str
    seconds: float

    def at(self, moment: float) -> float:
        return (moment - self.begin) / self.seconds


def last_moment(view: RunView, commits: Sequence[Replayed]) -> float:
    moments = [life.beat.at for life in view.learners if life.beat] + [commit.at for commit in commits]
    return max([*moments, view.manifest.founded_at])


def timescale(view: RunView, commits: Sequence[Replayed]) -> Timescale:
    starts = [life.record.started_at for life in (*view.earlier, *view.learners) if life.record]
    begin = min([*starts, view.manifest.founded_at])
    hours = last_moment(view, commits) - begin > 3 * 3600
    return Timescale(begin=begin, unit="hours" if hours else "minutes", seconds=3600.0 if hours else 60.0)


def _picture(title: str, says: str, svg: str) -> Picture:
    return Picture(title=title, says=says, svg=Markup(svg))


def run_pictures(view: RunView, commits: Sequence[Replayed], scale: Timescale) -> list[Picture]:
    """What the mailbox itself tells of the run."""
    time = f"time ({scale.unit})"
    shown = [
        _picture(
            "Who was there",
            "A bar for each life of a learner; a mark where a commit took something of it",
            charts.timeline(_spans(view, commits, scale), x=time),
        )
    ]
    if commits:
        shown += _round_pictures(view, commits, scale, time)
    return shown + _traffic_pictures(view)


def _round_pictures(view: RunView, commits: Sequence[Replayed], scale: Timescale, time: str) -> list[Picture]:
    versions = {
        f"fragment {fragment.index}": [(scale.at(each.at), float(each.version)) for each in commits if each.fragment == fragment.index]
        for fragment in view.fragments
    }
    contributors = {"contributors": [(scale.at(commit.at), float(len(commit.contributions))) for commit in commits]}
    names = sorted({each.learner_id for commit in commits for each in commit.contributions})
    piled, rate = _piled(commits, names, view, scale), _rate(commits, view, scale)
    shown = [
        _picture("Rounds", "Version of each fragment over time", charts.lines(versions, x=time, y="version", steps=True)),
        _picture("Contributors", "How many learners are in each commit", charts.dots(contributors, x=time, y="contributions")),
        _picture("Samples committed", "Samples in commits, by learner", charts.areas(piled, x=time, y="samples")),
        _picture("Goodput", "Samples committed a second, all learners together", charts.lines(rate, x=time, y="samples/s")),
    ]
    behind = _behind(commits, names, scale)
    if any(behind.values()):
        said = "Versions between the one that a contribution was counted from and the one before the commit that holds it"
        shown.append(_picture("Staleness", said, charts.dots(behind, x=time, y="versions behind")))
    return shown


def _behind(commits: Sequence[Replayed], names: Sequence[str], scale: Timescale) -> dict[str, list[charts.Point]]:
    return {
        name: [
            (scale.at(commit.at), float(each.behind))
            for commit in commits
            for each in commit.contributions
            if each.learner_id == name and each.behind is not None
        ]
        for name in names
    }


def _traffic_pictures(view: RunView) -> list[Picture]:
    beats = {life.learner_id: life.beat for life in view.learners if life.beat and life.beat.requests}
    if not beats:
        return []
    traffic = {"up": [beat.bytes_up / 1e6 for beat in beats.values()], "down": [beat.bytes_down / 1e6 for beat in beats.values()]}
    kinds = dict.fromkeys(kind for beat in beats.values() for kind, count in beat.requests.items() if count)
    requests = {kind: [float(beat.requests.get(kind, 0)) for beat in beats.values()] for kind in kinds}
    return [
        _picture("Bytes", "Megabytes up and down, by learner", charts.bars([*beats], traffic, x="MB")),
        _picture("Requests", "Requests to the store by kind and learner", charts.bars([*beats], requests, x="requests")),
    ]


def _spans(view: RunView, commits: Sequence[Replayed], scale: Timescale) -> list[charts.Span]:
    spans = []
    for life in sorted((*view.earlier, *view.learners), key=lambda each: (each.learner_id, each.generation)):
        marks = [
            commit.at
            for commit in commits
            for each in commit.contributions
            if (each.learner_id, each.generation) == (life.learner_id, life.generation)
        ]
        begin = life.record.started_at if life.record else min(marks, default=scale.begin)
        end = max([life.beat.at if life.beat else begin, *marks])
        spans.append(charts.Span(row=life.learner_id, begin=scale.at(begin), end=scale.at(end), marks=[scale.at(mark) for mark in marks]))
    return spans


def _piled(commits: Sequence[Replayed], names: Sequence[str], view: RunView, scale: Timescale) -> dict[str, list[charts.Point]]:
    """Samples committed so far after each commit, by learner. A sample is in each fragment once."""

    def samples(commit: Replayed, name: str) -> float:
        return sum(each.samples for each in commit.contributions if each.learner_id == name) / len(view.fragments)

    times = [scale.at(commit.at) for commit in commits]
    return {name: [*zip(times, accumulate(samples(commit, name) for commit in commits), strict=True)] for name in names}


def _rate(commits: Sequence[Replayed], view: RunView, scale: Timescale) -> dict[str, list[charts.Point]]:
    begin, end = scale.begin, commits[-1].at
    width = max((end - begin) / RATE_WINDOWS, 1e-9)
    sums = [0.0] * (RATE_WINDOWS + 1)
    for commit in commits:
        sums[int(max(0, min(RATE_WINDOWS, (commit.at - begin) / width)))] += sum(each.samples for each in commit.contributions)
    means = [sum(sums[max(0, i - 2) : i + 3]) / len(sums[max(0, i - 2) : i + 3]) for i in range(RATE_WINDOWS)]  # rounds come in bursts
    points = [(scale.at(begin + (i + 0.5) * width), mean / len(view.fragments) / width) for i, mean in enumerate(means)]
    return {"all learners": points}


def log_pictures(logs: Mapping[str, Mapping[str, Curve]]) -> list[Picture]:
    """What the nodes' own logs tell."""
    losses = pick(logs, "loss")
    found = (
        ("Validation loss", "loss", {name: curve for name, curve in losses.items() if "val" in name[1]}, 1),
        (f"Training loss (mean of {SMOOTH})", "loss", {name: curve for name, curve in losses.items() if "val" not in name[1]}, SMOOTH),
        ("Staleness of each node", "own steps on an old base", pick(logs, "staleness_steps"), 1),
        ("Stall of each node", "ms a step", pick(logs, "stall_ms_per_step"), 1),
        ("Learners in training, as each node saw them", "learners", pick(logs, "gradientmail/learners"), 1),
    )
    shown = []
    for title, y, curves, smooth in found:
        drawn = _by_log({name: curve for name, curve in curves.items() if len(curve) > 1})
        if drawn:
            says = f"{title} over the steps, or the samples, of each log"
            shown.append(_picture(title, says, charts.lines(drawn, x="steps, or samples", y=y, smooth=smooth)))
    return shown


def _by_log(curves: Mapping[tuple[str, str], Curve]) -> dict[str, Curve]:
    """Curves by the name of their log, and of their column where a log has several."""
    logs = [log for log, _ in curves]
    return {log if logs.count(log) == 1 else f"{log} {column}": curve for (log, column), curve in curves.items()}
