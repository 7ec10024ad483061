"""Merging the contributions of a round: weighted mean and radial-directional averaging.

Source: Decoupled DiLoCo (Douillard et al. 2026, arXiv 2604.21428). All arithmetic is fp32 and streams: one
contribution is in memory at a time, whatever their number. The order of the contributions is the order of
summation, so a merge can be replayed bit for bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gradientmail_torch.messages import TensorSpec

Method = Literal["mean", "rda"]

CLIP_TO_MEDIANS = 3.0
"""A contribution's norm per step is shortened to this many medians, where there are three or more."""
RDA_FROM = 4
"""``merge="auto"`` takes RDA from this many contributions on; its measured gain is at 8 and 16 learners."""
_VANISHED = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """One contribution to a merge."""

    weight: float
    tensors: Sequence[Tensor]
    """fp32 deltas in layout order; values, for buffers."""
    norms: Sequence[float]
    """L2 norm of each delta."""
    clips: Mapping[int, float] = field(default_factory=dict)
    """Factors below 1 by which tensors are shortened, by their place in the layout."""


def choose(rule: Literal["auto", "mean", "rda"], contributions: int) -> Method:
    if contributions == 1:
        return "mean"  # both are the identity; the mean is it to the last bit
    if rule == "auto":
        return "rda" if contributions >= RDA_FROM else "mean"
    return rule


def clip_factors(norms: Sequence[Sequence[float]], steps: Sequence[int]) -> list[dict[int, float]]:
    """For each contribution, the factors by tensor that bring its norm *per step* down to 3 × the median.

    Plain norms would cut down the one full contribution beside several that were called early. A tensor that
    most have not moved at all (an expert, a branch) has no measure to go by and is left as it is.
    """
    factors: list[dict[int, float]] = [{} for _ in steps]
    if len(steps) < 3:
        return factors
    for tensor, of_tensor in enumerate(zip(*norms, strict=True)):
        rates = [norm / count for norm, count in zip(of_tensor, steps, strict=True)]
        limit = CLIP_TO_MEDIANS * statistics.median(rates)
        for i, rate in enumerate(rates):
            if 0 < limit < rate:
                factors[i][tensor] = limit / rate
    return factors


def merge(contributions: Callable[[], Iterable[Weighted]], specs: Sequence[TensorSpec], method: Method) -> list[Tensor]:
    """The merged delta of each tensor (the merged value, for buffers), in fp32.

    RDA of vectors v with weights w is [Σ w‖v‖ / Σ w] · φ(Σ w φ(v) / Σ w), with φ(x) = x/‖x‖ and φ(0) = 0.
    Embedding tables, tensors of one element and buffers take the plain weighted mean, and so does a tensor
    whose mean direction vanishes. Integer buffers come from the heaviest contribution.

    ``contributions`` gives the contributions in the order of summation, and is called a second time where a
    direction vanishes. Of none, the merge is zero.
    """
    directional = [method == "rda" and spec.kind == "parameter" and not spec.embedding and spec.numel > 1 for spec in specs]
    sums, radii, total = _sum(contributions(), specs, directional)
    if total == 0:
        return sums
    vanished = [False] * len(specs)
    for i, spec in enumerate(specs):
        if directional[i]:
            norm = vector_norm(sums[i])
            vanished[i] = norm / total <= _VANISHED and radii[i] > 0
            if norm > 0:
                sums[i].mul_(radii[i] / total / norm)
        elif spec.floating and total != 1.0:
            sums[i].div_(total)
    if any(vanished):
        means, _, _ = _sum(contributions(), specs, [False] * len(specs))
        sums = [means[i].div_(total) if vanished[i] else sums[i] for i in range(len(specs))]
    return sums


def _sum(
    contributions: Iterable[Weighted], specs: Sequence[TensorSpec], directional: Sequence[bool]
) -> tuple[list[Tensor], list[float], float]:
    """Weighted sums of directions or vectors, weighted sums of norms, and the sum of weights.

    Weights are taken relative to the first one, so that a single contribution passes unchanged.
    """
    sums = [torch.zeros(spec.shape, dtype=torch.float32 if spec.floating else getattr(torch, spec.dtype)) for spec in specs]
    radii = [0.0] * len(specs)
    first = heaviest = total = 0.0
    for contribution in contributions:
        first = first or contribution.weight
        share = contribution.weight / first
        total += share
        for i, tensor in enumerate(contribution.tensors):
            scale = share * contribution.clips.get(i, 1.0)
            if not specs[i].floating:
                if contribution.weight > heaviest:
                    sums[i].copy_(tensor)
            elif directional[i]:
                radii[i] += scale * contribution.norms[i]
                if contribution.norms[i] > 0:
                    sums[i].add_(tensor, alpha=share / contribution.norms[i])
            else:
                sums[i].add_(tensor, alpha=scale)
        heaviest = max(heaviest, contribution.weight)
    return sums, radii, total


def vector_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32))


def norms(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[float]:
    """L2 norm of each delta, 0 for buffers."""
    return [vector_norm(tensor) if spec.kind == "parameter" else 0.0 for tensor, spec in zip(tensors, specs, strict=True)]
