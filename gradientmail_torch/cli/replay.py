"""``gradientmail replay``: who contributed what to which commit, from the commits' own records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from gradientmail_torch.cli.formats import plural
from gradientmail_torch.cli.run_view import RunView
from gradientmail_torch.cli.tables import add, table
from gradientmail_torch.messages import Commit

INITIAL_ANCHOR = "init"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    learner_id: str
    generation: int
    steps: int
    samples: int
    share: float
    """Of the commit's weight, from 0 to 1."""
    behind: int | None
    """Versions that had been committed since the one it was counted from; None when that is not said."""
    clipped: int
    """Tensors whose delta was shortened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    learner_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One commit."""

    fragment: int
    version: int
    at: float
    """Seconds since 1970 by the clock of the learner that merged it."""
    by: str
    method: str
    contributions: tuple[Contributed, ...]
    left_out: tuple[Refused, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """Everything of one learner. Steps and samples are counted in each fragment and divided by their number."""

    learner_id: str
    contributions: int
    steps: float
    samples: float
    merged: int
    """Commits that it made."""
    left_out: int


def replay(view: RunView) -> tuple[Replayed, ...]:
    """All commits of a view with its history, in the order in which they were made by their own times."""
    versions = {(commit.fragment, commit.nonce): commit.version for commit in view.commits}
    return tuple(sorted((_replayed(commit, versions) for commit in view.commits), key=lambda each: (each.at, each.fragment, each.version)))


def _replayed(commit: Commit, versions: dict[tuple[int, str], int]) -> Replayed:
    weight = sum(merged.weight for merged in commit.merged) or 1.0

    def behind(anchor: str) -> int | None:
        base = 0 if anchor == INITIAL_ANCHOR else versions.get((commit.fragment, anchor))
        return None if base is None else commit.version - 1 - base

    return Replayed(
        fragment=commit.fragment,
        version=commit.version,
        at=commit.at,
        by=commit.by,
        method=commit.method,
        contributions=tuple(
            Contributed(
                learner_id=merged.learner_id,
                generation=merged.generation,
                steps=merged.steps,
                samples=merged.samples,
                share=merged.weight / weight,
                behind=behind(merged.anchor),
                clipped=len(merged.clips),
            )
            for merged in commit.merged
        ),
        left_out=tuple(Refused(learner_id=each.learner_id, reason=each.reason) for each in commit.left_out),
    )


def totals(commits: Iterable[Replayed], fragments: int) -> tuple[Total, ...]:
    """What each learner has given to the run, by its name."""
    made = [*commits]
    names = {commit.by for commit in made}
    names |= {each.learner_id for commit in made for each in commit.contributions}
    names |= {each.learner_id for commit in made for each in commit.left_out}
    return tuple(_total(name, made, fragments) for name in sorted(names))


def _total(name: str, commits: list[Replayed], fragments: int) -> Total:
    own = [each for commit in commits for each in commit.contributions if each.learner_id == name]
    return Total(
        learner_id=name,
        contributions=len(own),
        steps=sum(each.steps for each in own) / fragments,
        samples=sum(each.samples for each in own) / fragments,
        merged=sum(commit.by == name for commit in commits),
        left_out=sum(each.learner_id == name for commit in commits for each in commit.left_out),
    )


def screen(commits: tuple[Replayed, ...], fragments: int, last: int) -> RenderableType:
    return Group(*_parts(commits, fragments, last))


def _parts(commits: tuple[Replayed, ...], fragments: int, last: int) -> Iterator[RenderableType]:
    shown = table("commit", "merged by", "contributions", "left out")
    for commit in commits[-last:] if last else commits:
        add(
            shown,
            f"fragment {commit.fragment} v{commit.version}",
            commit.by,
            "; ".join(_in_words(each) for each in commit.contributions) + (" (rda)" if commit.method == "rda" else ""),
            ("; ".join(f"{each.learner_id}: {each.reason}" for each in commit.left_out), "yellow"),
        )
    if last and len(commits) > last:
        yield Text(f"the last {last} of {plural(len(commits), 'commit')}", "dim")
    yield shown
    sums = table("learner", "contributions", "steps", "samples", "merged", "left out")
    for total in totals(commits, fragments):
        add(sums, total.learner_id, total.contributions, f"{total.steps:,.0f}", f"{total.samples:,.0f}", total.merged, total.left_out)
    yield sums


def _in_words(each: Contributed) -> str:
    late = f", {each.behind} behind" if each.behind else ""
    clipped = f", {each.clipped} clipped" if each.clipped else ""
    return f"{each.learner_id} {plural(each.steps, 'step')} {100 * each.share:.0f} %{late}{clipped}"
