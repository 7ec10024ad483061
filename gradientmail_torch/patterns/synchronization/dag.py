"""Which node waits for which: values and checks, no mailbox."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal, get_args

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.keys import encode_name

Trigger = Literal["any_called", "all_called", "all_reached"]
"""When a complete node runs its function; otherwise it is skipped.

``any_called``: at least one predecessor called. ``all_called``: none of them was skipped. ``all_reached``: always.
"""

Reached = Literal["called", "skipped", "failed"]
Decision = Literal["run", "skipped", "failed"]

START = "<start>"
"""The predecessor of a node that has none: whoever invokes it from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dag:
    """Nodes with their predecessors, in declared order. Predecessors need not be nodes themselves."""

    predecessors: dict[str, tuple[str, ...]]
    triggers: dict[str, Trigger]
    order: tuple[str, ...]
    """The nodes, each behind its predecessors."""
    successors: dict[str, tuple[str, ...]]
    """The nodes that each name is a predecessor of."""

    @staticmethod
    def of_node(name: str, predecessors: Sequence[str], trigger: Trigger) -> Dag:
        encode_name(name, what="node name")
        names = _names(predecessors, f"predecessors of {name!r}")
        if not names:
            raise ConfigError(f"node {name!r} has no predecessors: name at least one")
        return _checked({name: names}, {name: trigger})

    @staticmethod
    def of_edges(edges: Mapping[str, Sequence[str]], triggers: Mapping[str, Trigger] | None = None) -> Dag:
        """``edges`` leads from each node to its successors."""
        before: dict[str, list[str]] = {node: [] for node in _names(list(edges), "nodes")}
        for node, successors in edges.items():
            for successor in _names(successors, f"successors of {node!r}"):
                before.setdefault(successor, []).append(node)
        if not before:
            raise ConfigError("a workflow needs at least one node: edges is empty")
        unknown = set(triggers or ()) - before.keys()
        if unknown:
            raise ConfigError(f"triggers names {sorted(unknown)}, which no edge names: the nodes are {', '.join(sorted(before))}")
        given = {node: (triggers or {}).get(node, "any_called") for node in before}
        return _checked({node: tuple(found) or (START,) for node, found in before.items()}, given)

    @property
    def sinks(self) -> list[str]:
        """The nodes that nothing comes after."""
        return [name for name in self.order if not self.successors[name]]

    def check(self, node: str, by: str) -> None:
        """Raises :class:`ConfigError` unless ``by`` is a predecessor of ``node``."""
        if node not in self.predecessors:
            raise ConfigError(f"there is no node {node!r}: the nodes are {_shown(self.order)}")
        if by not in self.predecessors[node]:
            raise ConfigError(f"{by!r} is not a predecessor of {node!r}: they are {_shown(self.predecessors[node])}")


def decide(reached: Iterable[Reached], trigger: Trigger) -> Decision:
    """What becomes of a node whose predecessors have all ``reached`` it."""
    found = list(reached)
    if "failed" in found:
        return "failed"
    called = found.count("called")
    enough = {"any_called": called > 0, "all_called": called == len(found), "all_reached": True}[trigger]
    return "run" if enough else "skipped"


def _checked(predecessors: dict[str, tuple[str, ...]], triggers: dict[str, Trigger]) -> Dag:
    for node, trigger in triggers.items():
        if trigger not in get_args(Trigger):
            raise ConfigError(f"trigger of {node!r} must be one of {', '.join(get_args(Trigger))}, not {trigger!r}")
    try:
        order = [name for name in TopologicalSorter(predecessors).static_order() if name in predecessors]
    except CycleError as error:
        raise ConfigError(f"the nodes wait for each other in a circle: {' -> '.join(error.args[1])}. Remove one of these edges") from None
    after: dict[str, list[str]] = {node: [] for node in order}
    for node in order:
        for name in predecessors[node]:
            after.setdefault(name, []).append(node)
    successors = {name: tuple(found) for name, found in after.items()}
    return Dag(predecessors=predecessors, triggers=triggers, order=tuple(order), successors=successors)


def _names(names: Sequence[str], what: str) -> tuple[str, ...]:
    if isinstance(names, (str, bytes)):
        raise ConfigError(f"{what} must be a list of names, not {names!r}")
    found = tuple(names)
    for name in found:
        encode_name(name, what=f"a name among the {what}")
        if name == START:
            raise ConfigError(f"{START!r} stands for the start of a workflow and cannot be among the {what}")
    twice = [name for name, times in Counter(found).items() if times > 1]
    if twice:
        raise ConfigError(f"{', '.join(twice)} is named twice among the {what}")
    return found


def _shown(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(map(repr, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")
