"""Steering campaigns and synchronization as their listings show them: objects are counted, and few of them are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from gradientmail_torch import keys
from gradientmail_torch.cli.gather import names_below, read_all
from gradientmail_torch.cli.watching import BeatWatch
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import InvalidName
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.leased_work import Outcome
from gradientmail_torch.patterns.steering.queues.claims import ServerRecord
from gradientmail_torch.patterns.synchronization.ledger import Manifest

BETWEEN_LOOKS_S = 1.0
MOST_OUTCOMES_READ = 64
"""How many nodes that have ended are asked for how; of more it is only said that they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    server_id: str
    host: str
    slots: int
    methods: tuple[str, ...]
    beating: bool
    """Whether its beat has changed while it was watched. One that leaves in good order is not listed any more."""
    last_seen_s: float
    """Seconds of watching since the beat last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignView:
    """A steering queue. A task is in exactly one of the three."""

    name: str
    queued: int
    claimed: int
    """Claimed by a task server, perhaps a dead one."""
    done: int
    """With a result, be it a failure."""
    unread: int
    """Of those, the ones that the Thinker has not acknowledged."""
    stopping: bool
    """Whether the task servers have been told to stop."""
    servers: tuple[ServerView, ...]


NodeState = Literal["waiting", "complete", "running", "done", "failed", "skipped", "abandoned", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    name: str
    state: NodeState
    """``waiting`` for predecessors, ``complete`` and run by nobody yet, ``running``, or how it ended."""
    reached: tuple[str, ...]
    """Predecessors that have called or have been skipped."""
    missing: tuple[str, ...]
    attempts: int
    """Claims so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronizationView:
    """A workflow, or a node that stands alone."""

    run_id: str
    kind: Literal["workflow", "node"]
    nodes: tuple[NodeView, ...]


def campaigns(mailbox: Mailbox, watch: BeatWatch, *, longest_s: float = 0.0, clock: Clock = SYSTEM_CLOCK) -> tuple[CampaignView, ...]:
    """The steering queues: four listings each, and a request for each task server and look.

    The servers are watched until all of them have beaten, at most ``longest_s`` seconds.
    """
    names = [*names_below(mailbox, keys.CAMPAIGNS)]
    deadline = clock.monotonic() + longest_s
    while True:
        servers = {name: _servers(mailbox, name, watch, clock) for name in names}
        if all(server.beating for each in servers.values() for server in each) or clock.monotonic() >= deadline:
            return tuple(_campaign(mailbox, name, servers[name]) for name in names)
        clock.sleep(min(BETWEEN_LOOKS_S, deadline - clock.monotonic()))


def _campaign(mailbox: Mailbox, name: str, servers: tuple[ServerView, ...]) -> CampaignView:
    task = keys.TaskKeys.of(name)
    asked: set[str] = set()
    for key in mailbox.list(task.requests()):
        with contextlib.suppress(InvalidName):  # not ours
            asked.add(keys.parse_request(key).item)
    done, ended = 0, set[str]()
    for key in mailbox.list(task.results()):
        with contextlib.suppress(InvalidName):
            found = keys.parse_result(key)
            if found.part is None:
                done += 1
                ended |= asked & {found.item}
    claimed = _claimed(mailbox, task, asked - ended) if asked - ended else set()
    return CampaignView(
        name=name,
        queued=len(asked) - len(ended) - len(claimed),
        claimed=len(claimed),
        done=done,
        unread=len(ended),
        stopping=mailbox.get(task.stop(), length=1) is not None,
        servers=servers,
    )


def _claimed(mailbox: Mailbox, task: keys.TaskKeys, items: set[str]) -> set[str]:
    """Which of ``items`` have a claim. Claims of tasks that are older than all of them are not listed."""
    found: set[str] = set()
    for key in mailbox.list(task.claims(), after=task.claims_from(min(items))):
        with contextlib.suppress(InvalidName):
            found |= items & {keys.parse_claim(key).item}
    return found


def _servers(mailbox: Mailbox, name: str, watch: BeatWatch, clock: Clock) -> tuple[ServerView, ...]:
    records = read_all(mailbox, ServerRecord, mailbox.list(keys.TaskKeys.of(name).servers()), clock=clock)
    return tuple(_server(name, record, watch) for record in records if record is not None)


def _server(campaign: str, record: ServerRecord, watch: BeatWatch) -> ServerView:
    beating, last_seen_s = watch.see_count((campaign, record.server_id, record.nonce), record.count)
    return ServerView(
        server_id=record.server_id,
        host=record.host,
        slots=record.slots,
        methods=record.methods,
        beating=beating,
        last_seen_s=last_seen_s,
    )


@dataclass(slots=True)
class _Listed:
    """What the listing tells of one workflow or node."""

    keys: keys.SyncKeys
    reached: dict[str, list[str]] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    swept: bool = False

    def note(self, key: str) -> None:
        if key.startswith(self.keys.reached()):
            node, by = keys.parse_reached(key)
            self.reached.setdefault(node, []).append(by)
        elif key.startswith(self.keys.claims()):
            item, attempt = keys.parse_claim(key)
            self.attempts[item] = max(attempt, self.attempts.get(item, 0))
        elif key.startswith(self.keys.outcomes()):
            self.ended.append(keys.decode_name(keys.last_segment(key)))
        elif key == self.keys.expired():
            self.swept = True


def synchronizations(mailbox: Mailbox, *, clock: Clock = SYSTEM_CLOCK) -> tuple[SynchronizationView, ...]:
    """All that has not been swept away: one listing, and a request for each of them and for each node that has ended."""
    found: dict[str, _Listed] = {}
    for key in mailbox.list(keys.SyncKeys.all()):
        with contextlib.suppress(InvalidName):  # not ours
            belongs = keys.SyncKeys.containing(key)
            found.setdefault(belongs.root, _Listed(belongs)).note(key)
    shown = [listed for listed in found.values() if not listed.swept]
    manifests = read_all(mailbox, Manifest, (listed.keys.manifest() for listed in shown), clock=clock)
    return tuple(
        _synchronization(mailbox, listed, manifest, clock)
        for listed, manifest in zip(shown, manifests, strict=True)
        if manifest is not None  # begun this moment
    )


def _synchronization(mailbox: Mailbox, listed: _Listed, manifest: Manifest, clock: Clock) -> SynchronizationView:
    run_id, node = listed.keys.names
    asked = listed.ended[:MOST_OUTCOMES_READ]
    outcomes = dict(zip(asked, read_all(mailbox, Outcome, map(listed.keys.outcome, asked), clock=clock), strict=True))

    def view(name: str, predecessors: Iterable[str]) -> NodeView:
        reached = {*listed.reached.get(name, ())}
        missing = tuple(each for each in predecessors if each not in reached)
        attempts = listed.attempts.get(name, 0)
        state: NodeState = "waiting" if missing else "running" if attempts else "complete"
        if name in ended:
            outcome = outcomes.get(name)
            state = outcome.status if outcome is not None else "ended"
        return NodeView(
            name=name, state=state, reached=tuple(each for each in predecessors if each in reached), missing=missing, attempts=attempts
        )

    ended = {*listed.ended}
    return SynchronizationView(
        run_id=run_id,
        kind="node" if node else "workflow",
        nodes=tuple(view(name, predecessors) for name, predecessors in manifest.predecessors.items()),
    )
