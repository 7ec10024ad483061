"""What a commit should hold, worked out again: float64, from the formulas of the papers, with no code of the session's.

Sources: weights, clipping by norm per step and radial-directional averaging of Decoupled DiLoCo (arXiv 2604.21428);
SGD with Nesterov momentum on the merged delta of DiLoCo (arXiv 2311.08105).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradientmail_torch.algorithms import OuterSGD


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A contribution's share in a commit."""

    steps: int
    samples: int
    deltas: Sequence[Tensor]
    """One for each tensor of the fragment; all are parameters."""

    @property
    def weight(self) -> float:
        return self.samples * self.samples / self.steps


def method(rule: str, listed: int) -> str:
    """``mean`` or ``rda``, by the number of contributions in the round."""
    if listed <= 1:
        return "mean"
    return rule if rule != "auto" else ("rda" if listed >= 4 else "mean")


def merged(parts: Sequence[Part], listed: Sequence[Part], how: str) -> list[Tensor]:
    """The merged delta of each tensor. ``listed`` are all in the round, also those that were found to be unsound."""
    return [
        _merged([(p.weight, v.double()) for p, v in zip(parts, at, strict=True)], _limits(listed, i), parts, how) for i, at in _each(parts)
    ]


def _each(parts: Sequence[Part]) -> list[tuple[int, tuple[Tensor, ...]]]:
    return [*enumerate(zip(*(part.deltas for part in parts), strict=True))]


def _limits(listed: Sequence[Part], tensor: int) -> float:
    """The largest norm that one step may have; infinite for fewer than three contributions."""
    rates = [float(part.deltas[tensor].double().norm()) / part.steps for part in listed]
    return 3 * statistics.median(rates) if len(listed) >= 3 and statistics.median(rates) > 0 else float("inf")


def _merged(weighted: Sequence[tuple[float, Tensor]], limit: float, parts: Sequence[Part], how: str) -> Tensor:
    total = sum(weight for weight, _ in weighted)
    clipped = [(w, v * min(1.0, limit * part.steps / max(1e-300, float(v.norm())))) for (w, v), part in zip(weighted, parts, strict=True)]
    mean = torch.stack([w / total * v for w, v in clipped]).sum(0)
    if how == "mean" or mean.numel() == 1:
        return mean
    direction = torch.stack([w / total * v / max(1e-300, float(v.norm())) for w, v in weighted]).sum(0)
    radius = sum(w / total * float(v.norm()) for w, v in clipped)
    norm = float(direction.norm())
    return direction * (radius / norm) if norm > 1e-6 else mean


def outer_step(
    outer: OuterSGD, before: Sequence[Tensor], deltas: Sequence[Tensor], state: Sequence[Tensor] | None, version: int
) -> tuple[list[Tensor], list[Tensor]]:
    """The values after a commit, and the momentum; ``state`` is that of the version before."""
    momentum = min(outer.momentum, 1 - 1 / version) if outer.warmup else outer.momentum
    velocities = [d if state is None else momentum * state[i].double() + d for i, d in enumerate(deltas)]
    updates = [d + momentum * v if outer.nesterov else v for d, v in zip(deltas, velocities, strict=True)] if outer.momentum else deltas
    return [b.double() + outer.lr * u for b, u in zip(before, updates, strict=True)], velocities
