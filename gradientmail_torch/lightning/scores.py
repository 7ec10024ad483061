"""What an evaluation has counted so far: sums that can be added up in any split, and give the same in the end."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from gradientmail_torch.errors import ConfigError, CorruptObject, RunMismatch

Kind = Literal["mean", "sum", "max", "min"]

_HEADER = "scores"
_SEPARATOR = "\n"


class Scalar(NamedTuple):
    """A number that is averaged, summed or compared over batches."""

    kind: Kind
    total: float
    """The weighted sum of a mean; otherwise the value."""
    weight: float = 1.0

    @property
    def value(self) -> float:
        if self.kind != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan


class State(NamedTuple):
    """The states of a torchmetrics metric, lists of tensors concatenated."""

    tensors: dict[str, Tensor]
    updates: int
    """Updates that they hold."""


@dataclass(slots=True)
class Scores:
    scalars: dict[str, Scalar] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    fingerprint: str = ""
    """Of the parameters that were scored."""

    def to_bytes(self) -> bytes:
        updates = {name: state.updates for name, state in self.states.items()}
        header = {"scalars": self.scalars, "updates": updates, "fingerprint": self.fingerprint}
        parts = [(name, part, tensor) for name, state in self.states.items() for part, tensor in state.tensors.items()]
        tensors = {f"{name}{_SEPARATOR}{part}": tensor.contiguous() for name, part, tensor in parts}
        return save(tensors, metadata={_HEADER: json.dumps(header)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises :class:`CorruptObject`."""
        try:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
            states = {name: State({}, int(updates)) for name, updates in header["updates"].items()}
            for key, tensor in load(data).items():
                name, part = key.split(_SEPARATOR)
                states[name].tensors[part] = tensor
            scalars = {name: Scalar(*scalar) for name, scalar in header["scalars"].items()}
            return cls(scalars, states, str(header["fingerprint"]))
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise CorruptObject(f"these are no scores: {error}") from error


def merged(parts: Iterable[Scores], metrics: Mapping[str, Metric]) -> Scores:
    """The scores of all ``parts`` together. ``metrics`` say how their states add up.

    Raises :class:`ConfigError` when they cannot be, and :class:`RunMismatch` when they are of different parameters.
    """
    found = list(parts)
    if len(fingerprints := {part.fingerprint for part in found}) > 1:
        raise RunMismatch(
            f"the nodes scored {len(fingerprints)} different sets of parameters. Evaluate behind a barrier that all nodes reach after "
            "closing their sessions, or share the parameters first"
        )
    scalars = {name: added(name, some) for name, some in _by_name(part.scalars for part in found).items()}
    states = {name: _joined(name, some, metrics[name]) for name, some in _by_name(part.states for part in found).items()}
    return Scores(scalars, states, *fingerprints)


def results(scores: Scores, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The value of every score; a metric that computes several values gives one for each."""
    found = {name: scalar.value for name, scalar in scores.scalars.items()}
    for name, state in scores.states.items():
        metric = copy.deepcopy(metrics[name])
        metric.reset()
        metric.sync_on_compute = False  # the states are those of all nodes already
        for part, tensor in state.tensors.items():
            setattr(metric, part, [tensor] if isinstance(metric._defaults[part], list) else tensor.to(metric.device))
        metric._update_count = state.updates
        found |= _flat(name, metric.compute())
    return found


def state_of(metric: Metric) -> State:
    """A copy of the states of ``metric``; an empty list is left out."""
    tensors: dict[str, Tensor] = {}
    for name, value in metric.metric_state.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach().cpu().clone()
        elif value:
            tensors[name] = dim_zero_cat([each.detach().cpu() for each in value])
    return State(tensors, metric.update_count)


def added(name: str, parts: Sequence[Scalar]) -> Scalar:
    """All ``parts`` of one score together, exactly."""
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise ConfigError(f"{name!r} is logged with reduce_fx {' and '.join(sorted(kinds))}: use one of them")
    (kind,) = kinds
    totals = [part.total for part in parts]
    return Scalar(kind, _total(kind, totals), math.fsum(part.weight for part in parts))


def _total(kind: Kind, totals: list[float]) -> float:
    """The same in any order, also where some of them are NaN or infinite."""
    if any(map(math.isnan, totals)) or (kind in ("mean", "sum") and {math.inf, -math.inf} <= set(totals)):
        return math.nan
    return max(totals) if kind == "max" else min(totals) if kind == "min" else math.fsum(totals)


def _joined(name: str, parts: Sequence[State], metric: Metric) -> State:
    tensors: dict[str, Tensor] = {}
    for part, reduction in metric._reductions.items():
        having = [state for state in parts if part in state.tensors]
        if having:
            what = f"state {part!r} of metric {name!r} ({type(metric).__name__})"
            tensors[part] = _reduced([state.tensors[part] for state in having], [state.updates for state in having], reduction, what)
    return State(tensors, sum(state.updates for state in parts))


def _reduced(values: list[Tensor], updates: list[int], reduction: Any, what: str) -> Tensor:
    first = values[0]
    if reduction is dim_zero_cat:
        return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in values])
    stacked = torch.stack(values)
    if reduction is dim_zero_sum:
        return (stacked.double() if first.is_floating_point() else stacked).sum(0).to(first.dtype)
    if reduction is dim_zero_max:
        return stacked.amax(0)
    if reduction is dim_zero_min:
        return stacked.amin(0)
    if reduction is dim_zero_mean:
        weights = torch.tensor(updates, dtype=torch.float64).reshape(-1, *[1] * first.ndim)
        return ((stacked.double() * weights).sum(0) / weights.sum()).to(first.dtype)
    raise ConfigError(f"{what} cannot be merged over nodes: its reduction is none of sum, mean, max, min and cat")


def _flat(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(each) for key, each in value.items()}
    if isinstance(value, Tensor) and value.numel() > 1:
        return {f"{name}_{place}": float(each) for place, each in enumerate(value.flatten())}
    return {name: float(value)}


def _by_name(groups: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for group in groups:
        for name, value in group.items():
            found.setdefault(name, []).append(value)
    return found
