"""``gradientmail plan``: what a run will take of its links and its purse, from figures alone.

The arithmetic is that of the run protocol. P parameters in F fragments, N nodes, H steps a cycle; a contribution
takes w bytes a parameter and a commit c. In a cycle each node uploads its contribution (P·w) and its share of the
merging (P·c/N, and P·4/N for those who join, if its link has the time); it downloads what it merges (P·w) and what the
others have merged (P·c·(N−1)/N). So the traffic of a node hardly depends on N.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from gradientmail_torch.cli.formats import count, dollars, duration, size
from gradientmail_torch.cli.prices import PriceTable, Use
from gradientmail_torch.cli.tables import add, table
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.session.observer import Observer
from gradientmail_torch.session.patience import PATIENCE

BYTES_PER_PARAMETER = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 256, "int4": 0.5 + 2 / 128, "e3m0": 0.5 + 2 / 128, "sparse": 114 / 4096}
"""By wire format; a block of small numbers has a scale of two bytes."""
WHOLE_EVERY = 4
"""One commit in so many holds the fragment in fp32; the others are followed by it."""
WHOLE_SHARE = 1 / 8
"""Part of the time for which an uplink carries what follows."""
FAN_IN = 32
"""Contributions that one node reads for a commit; more are summed in groups of so many, in fp32, ahead of the merge."""
FRAGMENT_BYTES = 64 << 20
MAX_FRAGMENTS = 24
NICE_CYCLES = (20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 1500, 2000, 5000)
"""Cycles to recommend. Below 20 steps nothing is gained; quality falls slowly with longer ones."""
LONG_CYCLE = 100
"""A longer cycle is worth a wire format of fewer bits."""
LINK_LOAD = 0.5
"""Part of a cycle for which a link may be busy, so that a slow hour of it does no harm."""
POLL_S = 1.0
BEAT_S = 5.0
COPY_BYTES_PER_S = 8e9
"""Host memory, as one core copies it."""
COPIES = 4
"""Times a parameter's four bytes pass through memory on the training thread in a cycle: snapshot, correction."""
HOST_MODELS = 3.4
"""Host memory that a session takes at most beside the model, in models of fp32, where a GPU trains: its base and what is on its way."""
PART_BYTES = 8 << 20
"""A larger upload goes in parts, a request each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is given."""

    parameters: float
    nodes: int
    uplink_bits_per_s: float
    downlink_bits_per_s: float
    seconds_per_step: float
    momentum: bool = False
    """Whether the outer optimizer keeps state, which travels from one syncer to the next."""

    def __post_init__(self) -> None:
        for name, least in (("parameters", 1), ("nodes", 1), ("uplink_bits_per_s", 1), ("downlink_bits_per_s", 1)):
            if not least <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.seconds_per_step < math.inf:
            raise ConfigError(f"seconds_per_step must be above 0, not {self.seconds_per_step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What can be chosen."""

    wire: str
    fragments: int
    sync_every: int
    commit_wire: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("wire", "commit_wire"):
            if getattr(self, name) not in BYTES_PER_PARAMETER:
                raise ConfigError(f"{name} must be one of {', '.join(BYTES_PER_PARAMETER)}, not {getattr(self, name)!r}")
        if self.fragments < 1 or self.sync_every < 1:
            raise ConfigError("fragments and sync_every must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    situation: Situation
    settings: Settings
    up_per_cycle_bytes: float
    """Of each node, as is all below."""
    down_per_cycle_bytes: float
    cycle_s: float
    link_load: float
    """Part of the time for which the busier direction of the link is in use; above 1 the run falls behind."""
    round_s: float
    """From the step at which a fragment is contributed to the moment at which its commit can be adopted."""
    stall_percent: float
    """Part of its time that the training thread spends on copies. It never waits for the network."""
    stall_if_synchronous_percent: float
    """The same for DiLoCo, where all wait for every exchange."""
    host_bytes: float
    """Host memory at most, without the model, where a GPU trains it."""
    per_hour: Use
    dollars_per_node_hour: dict[str, float]

    @property
    def round_steps(self) -> float:
        """Steps that a node takes while a round is on its way: how old what it adopts is."""
        return self.round_s / self.situation.seconds_per_step

    @property
    def fits(self) -> bool:
        return self.link_load <= 1 and self.round_s <= self.cycle_s


def plan(situation: Situation, settings: Settings, prices: PriceTable) -> Plan:
    """What ``settings`` mean in ``situation``."""
    p, n, f = situation.parameters, situation.nodes, settings.fragments
    up_rate, down_rate = situation.uplink_bits_per_s / 8, situation.downlink_bits_per_s / 8
    cycle_s = settings.sync_every * situation.seconds_per_step
    wire = BYTES_PER_PARAMETER[settings.wire]
    commit = BYTES_PER_PARAMETER[settings.commit_wire]
    whole = 4 / WHOLE_EVERY if settings.commit_wire != "fp32" else 0.0
    following = min(p * (4 - whole) / n, WHOLE_SHARE * up_rate * cycle_s) if whole else 0.0
    state = 4.0 if situation.momentum else 0.0
    merged_up = p * (commit + whole + state) / n
    sums = 4.0 * p / FAN_IN if n > FAN_IN else 0.0
    up = p * wire + merged_up + following + sums
    down = p * (wire + state / n) + p * commit * (n - 1) / n + sums
    transfer_s = (up / up_rate, down / down_rate)
    merge_s = min(n, FAN_IN) * p * wire / f / down_rate + p * commit / f / up_rate
    if sums:
        merge_s += 4 * p / f / up_rate + math.ceil(n / FAN_IN) * 4 * p / f / down_rate
    round_s = p * wire / f / up_rate + 3 * POLL_S + merge_s + POLL_S + p * commit / f / down_rate
    copies_s = COPIES * 4 * p / COPY_BYTES_PER_S
    whole_exchange_s = (p * wire / up_rate + n * p * wire / down_rate / min(n, f)) + merged_up / up_rate + p * commit / down_rate + POLL_S
    per_hour = _use_per_hour(n, f, cycle_s, round_s, up, down)
    return Plan(
        situation=situation,
        settings=settings,
        up_per_cycle_bytes=up,
        down_per_cycle_bytes=down,
        cycle_s=cycle_s,
        link_load=max(transfer_s) / cycle_s,
        round_s=round_s,
        stall_percent=100 * copies_s / (cycle_s + copies_s),
        stall_if_synchronous_percent=100 * whole_exchange_s / (cycle_s + whole_exchange_s),
        host_bytes=HOST_MODELS * 4 * p,
        per_hour=per_hour,
        dollars_per_node_hour={name: per_hour.dollars(price) for name, price in prices.stores.items()},
    )


def _use_per_hour(nodes: int, fragments: int, cycle_s: float, round_s: float, up: float, down: float) -> Use:
    """Requests of one node: heartbeats, watching the others, watching the rounds, and the exchange itself.

    A node makes a cycle's requests once a cycle, or as often as its links allow.
    """
    cycles = 3600 / max(cycle_s, round_s)
    open_share = min(1.0, fragments * round_s / cycle_s)
    looks = 3600 / POLL_S * (open_share + (1 - open_share) / 4)  # it looks less often while no round is open
    parts = up / PART_BYTES * cycles
    return Use(
        writes=3600 / BEAT_S * 2 + looks + cycles * fragments * (2 + 4 / nodes) + parts,
        reads=3600 / BEAT_S * (1 + min(nodes, Observer.WATCHED)) + cycles * fragments * (4 + _looks(min(round_s, cycle_s))),
        bytes_up=up * cycles,
        bytes_down=down * cycles,
    )


def _looks(seconds: float) -> float:
    """How often a node asks for something that comes after so many seconds; see :class:`Wait`."""
    looks, at_first = seconds / POLL_S, 1 / PATIENCE
    return looks if looks <= at_first else at_first * (1 + math.log(looks / at_first))


def fragments_for(parameters: float) -> int:
    """As a session divides a model when it is left open."""
    return max(1, min(MAX_FRAGMENTS, math.ceil(4 * parameters / FRAGMENT_BYTES)))


def recommend(
    situation: Situation, prices: PriceTable, *, wire: str | None = None, fragments: int | None = None, commit_wire: str = "bf16"
) -> Plan:
    """The shortest cycle that the links carry with ease; a format of fewer bits where bf16 would need a long one."""
    fragments = fragments or fragments_for(situation.parameters)
    best: Plan | None = None
    for form in (wire,) if wire else ("bf16", "int8", "int4"):
        for sync_every in NICE_CYCLES:
            best = plan(situation, Settings(wire=form, fragments=fragments, sync_every=sync_every, commit_wire=commit_wire), prices)
            if best.link_load <= LINK_LOAD and best.round_s <= best.cycle_s:
                break
        assert best is not None
        if best.settings.sync_every <= LONG_CYCLE:
            break
    assert best is not None
    return best


def screen(chosen: Plan, prices: PriceTable, *, others: tuple[Plan, ...] = ()) -> RenderableType:
    return Group(*_parts(chosen, prices, others))


def _parts(chosen: Plan, prices: PriceTable, others: tuple[Plan, ...]) -> Iterator[RenderableType]:
    s = chosen.settings
    given = chosen.situation
    yield Text(
        f"{count(given.parameters)} parameters, {given.nodes} nodes, {count(given.uplink_bits_per_s)}bit/s up and "
        f"{count(given.downlink_bits_per_s)}bit/s down, {given.seconds_per_step:g} s a step\n"
    )
    commits = "" if s.commit_wire == "bf16" else f", commit_wire={s.commit_wire!r}"
    yield Text(f"DecoupledDiLoCo(sync_every={s.sync_every}, fragments={s.fragments}, wire={s.wire!r}{commits})\n", "bold green")
    figures = table("", "", header=False)
    for name, value in _figures(chosen):
        add(figures, name, value)
    yield figures
    if not chosen.fits:
        yield Text("This does not fit: contributions would come in faster than the links carry them.", "bold red")
    yield _dollar_table(chosen, prices)
    if others:
        more = table("wire", "sync_every", "load of the link", "a round", "stall", right=("sync_every", "load of the link"))
        for other in others:
            steps = f"{duration(other.round_s)} = {other.round_steps:.0f} steps"
            add(
                more,
                other.settings.wire,
                other.settings.sync_every,
                f"{100 * other.link_load:.0f} %",
                steps,
                f"{other.stall_percent:.1f} %",
            )
        yield Text("\nThe shortest cycles that the links carry with ease:")
        yield more


def _figures(chosen: Plan) -> Iterator[tuple[str, str]]:
    yield "cycle", f"{duration(chosen.cycle_s)}, {size(chosen.up_per_cycle_bytes)} up and {size(chosen.down_per_cycle_bytes)} down a node"
    yield "load of the link", f"{100 * chosen.link_load:.0f} %"
    yield "a round", f"{duration(chosen.round_s)}: a commit is {chosen.round_steps:.0f} steps old when it is adopted"
    yield "stall", f"{chosen.stall_percent:.1f} % of the time goes into copies; training never waits for the network"
    yield "synchronous", f"with DiLoCo instead all would wait {chosen.stall_if_synchronous_percent:.0f} % of the time"
    yield "host memory", f"up to {size(chosen.host_bytes)} beside the model, where a GPU trains it"
    hour = chosen.per_hour
    yield "a node-hour", f"{hour.writes:,.0f} writes, {hour.reads:,.0f} reads, {size(hour.bytes_up)} up, {size(hour.bytes_down)} down"


def _dollar_table(chosen: Plan, prices: PriceTable) -> RenderableType:
    shown = table("store", "a node-hour, $", "all nodes a day, $", "", right=("a node-hour, $", "all nodes a day, $"))
    for name, amount in chosen.dollars_per_node_hour.items():
        add(shown, name, dollars(amount), dollars(24 * chosen.situation.nodes * amount), prices.stores[name].label)
    return shown
