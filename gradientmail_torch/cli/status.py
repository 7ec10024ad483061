"""``gradientmail status``: what matters of a run, on one screen or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradientmail_torch import keys
from gradientmail_torch.cli.formats import count, duration, plural, size, some
from gradientmail_torch.cli.patterns_view import CampaignView, NodeState, ServerView, SynchronizationView, campaigns, synchronizations
from gradientmail_torch.cli.run_view import (
    BarrierView,
    FragmentView,
    LifeView,
    OpenRound,
    QueueView,
    RunView,
    read_barriers,
    read_queues,
    read_run,
)
from gradientmail_torch.cli.tables import add, printable, table
from gradientmail_torch.cli.watching import BeatWatch, Presence, Sighting, sightings
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.mailbox import Mailbox

MOST_SHOWN = 12
"""Of a long list."""
_OPEN: Mapping[NodeState, str] = {"waiting": "yellow", "complete": "", "running": "green"}
"""States of nodes that have not ended, and their colours."""
_STYLES: Mapping[Presence, str] = {"alive": "green", "silent": "bold red", "ended": "dim", "unknown": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStatus:
    learner_id: str
    generation: int
    host: str
    presence: Presence
    last_seen_s: float
    """Seconds of this command's own watching since the beat last changed."""
    state: str
    """What the last beat says: joining, training, waiting, leaving or ended; empty before the first."""
    steps: int
    samples: int
    samples_per_second: float
    staleness_steps: int
    stall_percent: float
    """Part of its time that the training thread lost to the session."""
    bytes_up: int
    bytes_down: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentStatus:
    fragment: int
    tensors: int
    parameters: int
    version: int
    merged_by: str
    contributors: tuple[str, ...]
    """Of the newest commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    mailbox: str
    founder: str
    algorithm: str
    parameters: int
    learners: tuple[LearnerStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    open_rounds: tuple[OpenRound, ...]
    barriers: tuple[BarrierView, ...]
    queues: tuple[QueueView, ...]
    campaigns: tuple[CampaignView, ...] = ()
    synchronizations: tuple[SynchronizationView, ...] = ()

    @property
    def patterns(self) -> bool:
        """Whether there is anything besides a run."""
        return bool(self.barriers or self.queues or self.campaigns or self.synchronizations)


def read_status(mailbox: Mailbox, watch: BeatWatch, *, longest_s: float, clock: Clock = SYSTEM_CLOCK) -> Status:
    """Watch the beats for as long as it takes to tell who is there, at most ``longest_s`` seconds, then read what is there.

    Raises :class:`RunMismatch` when the mailbox holds neither a run nor anything that the patterns write.
    """
    deadline = clock.monotonic() + longest_s
    campaigns(mailbox, watch, clock=clock)  # a first look, so that the time that follows counts for its servers
    if mailbox.get(keys.RUN, length=1) is None:
        found = Status(barriers=read_barriers(mailbox, ()), queues=read_queues(mailbox), mailbox=repr(mailbox), **_NO_RUN)
    else:
        seen = sightings(mailbox, read_run(mailbox, clock=clock).learners, watch, longest_s=longest_s, clock=clock)
        found = describe(read_run(mailbox, clock=clock), seen)
    found = replace(
        found,
        campaigns=campaigns(mailbox, watch, longest_s=max(0.0, deadline - clock.monotonic()), clock=clock),
        synchronizations=synchronizations(mailbox, clock=clock),
    )
    if not found.founder and not found.patterns:
        read_run(mailbox, clock=clock)  # says that there is none
    return found


_NO_RUN: dict[str, Any] = {"founder": "", "algorithm": "", "parameters": 0, "learners": (), "fragments": (), "open_rounds": ()}


def describe(view: RunView, seen: Mapping[keys.Life, Sighting]) -> Status:
    """The run alone."""
    return Status(
        mailbox=view.mailbox,
        founder=view.manifest.founder,
        algorithm=str(view.manifest.algorithm.get("name", "?")),
        parameters=view.parameters,
        learners=tuple(_learner(life, seen.get(keys.Life(life.learner_id, life.generation))) for life in view.learners),
        fragments=tuple(_fragment(fragment) for fragment in view.fragments),
        open_rounds=view.rounds,
        barriers=view.barriers,
        queues=view.queues,
    )


def _learner(life: LifeView, sighting: Sighting | None) -> LearnerStatus:
    beat = life.beat
    return LearnerStatus(
        learner_id=life.learner_id,
        generation=life.generation,
        host=life.record.host if life.record else "",
        presence=sighting.presence if sighting else "unknown",
        last_seen_s=sighting.still_s if sighting else 0.0,
        state=beat.state if beat else "",
        steps=beat.steps if beat else 0,
        samples=beat.samples if beat else 0,
        samples_per_second=life.samples_per_second,
        staleness_steps=beat.staleness_steps if beat else 0,
        stall_percent=100 * beat.stall_seconds / beat.seconds if beat and beat.seconds else 0.0,
        bytes_up=beat.bytes_up if beat else 0,
        bytes_down=beat.bytes_down if beat else 0,
        requests=sum(beat.requests.values()) if beat else 0,
    )


def _fragment(fragment: FragmentView) -> FragmentStatus:
    commit = fragment.commit
    return FragmentStatus(
        fragment=fragment.index,
        tensors=fragment.tensors,
        parameters=fragment.parameters,
        version=fragment.version,
        merged_by=commit.by if commit else "",
        contributors=tuple(merged.learner_id for merged in commit.merged) if commit else (),
    )


def screen(status: Status) -> RenderableType:
    """The status as tables."""
    return Group(*_parts(status))


def _parts(status: Status) -> Iterator[RenderableType]:
    here = sum(learner.presence == "alive" for learner in status.learners)
    training = sum(learner.presence == "alive" and learner.state == "training" for learner in status.learners)
    about = f"{count(status.parameters)} parameters, {status.algorithm}; {plural(here, 'learner')} here, {training} training"
    yield Text.assemble((printable(status.mailbox), "bold"), "\n", about if status.founder else "no training run here")
    run = (_learner_table(status), _fragment_table(status)) if status.founder else ()
    for shown in (*run, *_patterns(status)):
        yield Text()
        yield shown


def _learner_table(status: Status) -> Table:
    figures = ("steps", "samp/s", "stale", "stall", "up", "down")
    shown = table("learner", "seen", "state", *figures, right=figures, whole=figures)
    for each in status.learners:
        seen = {"alive": "now", "silent": f"silent for {duration(each.last_seen_s)}", "ended": "left"}.get(each.presence, "?")
        add(
            shown,
            each.learner_id + (f" (life {each.generation})" if each.generation > 1 else ""),
            (seen, _STYLES[each.presence]),
            each.state,
            f"{each.steps:,}",
            f"{each.samples_per_second:.1f}" if each.presence == "alive" else "",
            each.staleness_steps,
            f"{each.stall_percent:.1f} %",
            size(each.bytes_up),
            size(each.bytes_down),
        )
    return shown


def _fragment_table(status: Status) -> Table:
    shown = table("fragment", "parameters", "version", "merged by", "contributors", "open round")
    opened: dict[int, list[str]] = {}
    for each in status.open_rounds:
        opened.setdefault(each.fragment, []).append(f"v{each.version}: {', '.join(each.contributors)}")
    for fragment in status.fragments:
        add(
            shown,
            fragment.fragment,
            count(fragment.parameters),
            fragment.version,
            fragment.merged_by,
            ", ".join(fragment.contributors),
            "; ".join(opened.get(fragment.fragment, [])),
        )
    return shown


def _patterns(status: Status) -> Iterator[Table]:
    if status.barriers:
        shown = table("barrier", "arrived", "not arrived")
        for barrier in status.barriers:
            add(shown, barrier.name, ", ".join(barrier.arrived), (", ".join(barrier.missing), "yellow"))
        yield shown
    if status.queues:
        shown = table("queue", "done", "in work", "left", "failed")
        for queue in status.queues:
            p = queue.progress
            add(shown, queue.name, *((p.done, p.claimed, p.left, p.failed) if p else ("not filled", "", "", "")))
        yield shown
    if status.campaigns:
        figures = ("queued", "in work", "done", "unread")
        shown = table("campaign", *figures, "task servers", right=figures)
        for campaign in status.campaigns:
            doers = [_server(server) for server in campaign.servers] + ["told to stop"] * campaign.stopping
            add(shown, campaign.name, campaign.queued, campaign.claimed, campaign.done, campaign.unread, "; ".join(doers))
        yield shown
    if status.synchronizations:
        yield _synchronization_table(status.synchronizations)


def _server(server: ServerView) -> str:
    seen = "here" if server.beating else f"not seen for {duration(server.last_seen_s)}"
    return f"{server.server_id} ({plural(server.slots, 'slot')}, {seen})"


def _synchronization_table(found: Iterable[SynchronizationView]) -> Table:
    """The nodes that are open, each with whom it waits for; of those that have ended, how many."""
    shown = table("synchronization", "node", "state", "reached by", "missing")
    for run in found:
        left = [node for node in run.nodes if node.state in _OPEN]
        ended = Counter(node.state for node in run.nodes if node.state not in _OPEN)
        name = run.run_id
        for node in left[:MOST_SHOWN]:
            state = node.state + (f", attempt {node.attempts}" if node.attempts > 1 else "")
            add(shown, name, node.name, (state, _OPEN[node.state]), some(node.reached), (some(node.missing), "yellow"))
            name = ""
        more = [f"{len(left) - MOST_SHOWN} more open"] if len(left) > MOST_SHOWN else []
        if ended or more:
            alone = run.nodes[0].name if run.kind == "node" else ""
            add(shown, name, alone, (", ".join([*more, *(f"{number} {state}" for state, number in ended.items())]), "dim"), "", "")
    return shown
