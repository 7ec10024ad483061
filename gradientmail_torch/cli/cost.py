"""``gradientmail cost``: what a run has asked of its store so far, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from gradientmail_torch.cli.formats import dollars, duration, plural, size
from gradientmail_torch.cli.prices import PriceTable, Use, recognize, used
from gradientmail_torch.cli.run_view import RunView
from gradientmail_torch.cli.tables import add, table


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerCost:
    learner_id: str
    seconds: float
    """How long the lives that are counted have lasted."""
    lives: int
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCost:
    store: str
    label: str
    so_far: float
    """Dollars of all learners together."""
    per_node_hour: float
    here: bool
    """Whether the run's mailbox is in this store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    mailbox: str
    prices_of: str
    """Date of the price table."""
    learners: tuple[LearnerCost, ...]
    lives_not_counted: int
    """Earlier lives of restarted learners that ended before their first beat, or whose last one is gone."""
    stores: tuple[StoreCost, ...]


def cost(view: RunView, prices: PriceTable) -> Cost:
    learners = tuple(
        LearnerCost(
            learner_id=life.learner_id,
            seconds=life.beat.seconds + life.beat.earlier.seconds,
            lives=1 + life.beat.earlier.lives,
            use=used(life.beat) + used(life.beat.earlier),
        )
        for life in view.learners
        if life.beat is not None
    )
    total = sum((learner.use for learner in learners), Use())
    hours = sum(learner.seconds for learner in learners) / 3600
    here = recognize(view.mailbox)
    return Cost(
        mailbox=view.mailbox,
        prices_of=prices.date,
        learners=learners,
        lives_not_counted=sum(life.generation for life in view.learners) - sum(learner.lives for learner in learners),
        stores=tuple(
            StoreCost(
                store=name,
                label=price.label,
                so_far=total.dollars(price),
                per_node_hour=total.dollars(price) / hours if hours else 0.0,
                here=name == here,
            )
            for name, price in prices.stores.items()
        ),
    )


def screen(shown: Cost) -> RenderableType:
    return Group(*_parts(shown))


def _parts(shown: Cost) -> Iterator[RenderableType]:
    use = table("learner", "time", "writes", "reads", "up", "down", right=("time", "writes", "reads", "up", "down"))
    for learner in shown.learners:
        u = learner.use
        name = learner.learner_id + (f" ({learner.lives} lives)" if learner.lives > 1 else "")
        add(use, name, duration(learner.seconds), f"{u.writes:,.0f}", f"{u.reads:,.0f}", size(u.bytes_up), size(u.bytes_down))
    yield use
    if shown.lives_not_counted:
        yield Text(f"{plural(shown.lives_not_counted, 'earlier life', 'earlier lives')} of restarted learners not counted", "yellow")
    stores = table("store", "so far, $", "a node-hour, $", "", right=("so far, $", "a node-hour, $"))
    for store in shown.stores:
        add(stores, store.store, dollars(store.so_far), dollars(store.per_node_hour), store.label + (" (this one)" if store.here else ""))
    yield stores
    yield Text(f"Requests and traffic at the list prices of {shown.prices_of}; what is stored is billed besides.", "dim")
