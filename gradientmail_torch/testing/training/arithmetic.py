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


Read = tuple[Sequence[Part], Sequence[Part]]
"""What one learner has merged, and that together with what it has found to be unsound: clipping goes by all of it."""


def merged(reads: Sequence[Read], how: str) -> list[Tensor]:
    """The merged delta of each tensor; several learners have read where groups were summed ahead."""
    parts = [part for mine, _ in reads for part in mine]
    return [
        _merged([part.deltas[i].double() for part in parts], [_limits(listed, i) for mine, listed in reads for _ in mine], parts, how)
        for i in range(len(parts[0].deltas))
    ]


def summed(read: Read, how: str) -> tuple[list[Tensor], list[float]]:
    """By tensor, the weighted sum of vectors or directions, and of norms; weights are relative to the first."""
    parts, listed = read
    sums, radii = [], []
    for i in range(len(parts[0].deltas)):
        terms, norms = [], []
        for part in parts:
            share, vector = part.weight / parts[0].weight, part.deltas[i].double()
            norm = float(vector.norm())
            clip = min(1.0, _limits(listed, i) * part.steps / max(1e-300, norm))
            terms.append(share * (vector / max(1e-300, norm) if how == "rda" else clip * vector))
            norms.append(share * clip * norm)
        sums.append(torch.stack(terms).sum(0))
        radii.append(sum(norms) if how == "rda" else 0.0)
    return sums, radii


def _limits(listed: Sequence[Part], tensor: int) -> float:
    """The largest norm that one step may have; infinite for fewer than three contributions."""
    rates = [float(part.deltas[tensor].double().norm()) / part.steps for part in listed]
    return 3 * statistics.median(rates) if len(listed) >= 3 and statistics.median(rates) > 0 else float("inf")


def _merged(vectors: Sequence[Tensor], limits: Sequence[float], parts: Sequence[Part], how: str) -> Tensor:
    weighted = [(part.weight, vector) for part, vector in zip(parts, vectors, strict=True)]
    total = sum(weight for weight, _ in weighted)
    clipped = [
        (w, v * min(1.0, limit * part.steps / max(1e-300, float(v.norm()))))
        for (w, v), limit, part in zip(weighted, limits, parts, strict=True)
    ]
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
