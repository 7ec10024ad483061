"""Merging the contributions of a round: weighted mean and radial-directional averaging.

Source: Decoupled DiLoCo (Douillard et al. 2026, arXiv 2604.21428). All arithmetic is fp32 and streams: one
contribution is in memory at a time, whatever their number. The order of the contributions is the order of
summation, so a merge can be replayed bit for bit. Sums of groups may be made ahead, by several learners, and summed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gradientmail_torch.messages import TensorSpec

Method = Literal["mean", "rda"]

CLIP_TO_MEDIANS = 3.0
"""A contribution's norm per step is shortened to this many medians, where there are three or more."""
OUT_OF_PROPORTION = 1e6
"""By how much more than its size, or than 1, a tensor's elements may move at a time (root mean square)."""
RDA_FROM = 4
"""``merge="auto"`` takes RDA from this many contributions on; its measured gain is at 8 and 16 learners."""
_VANISHED = 1e-6
_NOTHING = 1e-30
"""A norm below this is that of zeros: in fp32 the squares of anything so small are 0."""
_DWARFS = 2.0**20
"""Weights are counted in units of the first one, and anew in those of one so much larger: fp32 ends at 3e38."""


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

    The median is that of the contributions which one learner reads: where groups are summed ahead, of a group's, so
    that nobody has to read every record of a round. A group of some 32 learners has a median much like that of all.

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


@dataclass(slots=True, kw_only=True)
class Sums:
    """Contributions that have been summed, and may be summed further as one part among others.

    Weights are relative to that of the first contribution, so that a single one passes unchanged.
    """

    unit: float
    """Weight of the first contribution, or of the last one that has dwarfed those before."""
    total: float
    """Sum of the weights, in units."""
    heaviest: float
    """The largest weight."""
    tensors: list[Tensor]
    """By tensor, Σ w·v, or Σ w·φ(v) where directions are merged; of buffers their mean, of integers that of the heaviest contribution."""
    radii: list[float]
    """By tensor, Σ w‖v‖ where directions are merged."""

    def weigh(self, weight: float, specs: Sequence[TensorSpec]) -> float:
        """``weight`` in units, which is the unit from here on where it dwarfs the one before. ``specs`` are those of the tensors."""
        if weight > _DWARFS * self.unit:
            shrunk = self.unit / weight
            if shrunk > 0:
                for tensor, spec in zip(self.tensors, specs, strict=True):
                    if spec.kind == "parameter":
                        tensor.mul_(shrunk)
                self.radii = [radius * shrunk for radius in self.radii]
            self.total *= shrunk
            self.unit = weight
        return weight / self.unit


class DirectionVanished(Exception):
    """A mean direction vanishes, and contributions have been summed already: merge them one by one."""


def merge(parts: Callable[[], Iterable[Weighted | Sums]], specs: Sequence[TensorSpec], method: Method) -> list[Tensor]:
    """The merged delta of each tensor (the merged value, for buffers), in fp32.

    RDA of vectors v with weights w is [Σ w‖v‖ / Σ w] · φ(Σ w φ(v) / Σ w), with φ(x) = x/‖x‖ and φ(0) = 0.
    Embedding tables, tensors of one element and buffers take the plain weighted mean, and so does a tensor
    whose mean direction vanishes. Integer buffers come from the heaviest contribution.

    ``parts`` gives the contributions in the order of summation, and is called a second time where a direction
    vanishes; then sums raise :class:`DirectionVanished`. Of no parts, the merge is zero.
    """
    directional = _directional(specs, method)
    summed = _sum(parts(), specs, directional)
    sums, total = summed.tensors, summed.total
    if total == 0:
        return sums
    vanished = [False] * len(specs)
    for i, spec in enumerate(specs):
        if directional[i]:
            norm = vector_norm(sums[i])
            vanished[i] = norm / total <= _VANISHED and summed.radii[i] > 0
            if norm > 0 and not vanished[i]:
                sums[i].mul_(summed.radii[i] / total / norm)
        elif spec.kind == "parameter" and total != 1.0:
            sums[i].div_(total)
    if any(vanished):
        means = _sum(_one_by_one(parts()), specs, [False] * len(specs)).tensors
        sums = [means[i].div_(total) if vanished[i] else sums[i] for i in range(len(specs))]
    return sums


def summed(contributions: Iterable[Weighted], specs: Sequence[TensorSpec], method: Method) -> Sums:
    """What ``contributions`` bring to a merge by ``method``."""
    return _sum(contributions, specs, _directional(specs, method))


def combined(sums: Iterable[Sums], specs: Sequence[TensorSpec]) -> Sums:
    """The sum of sums."""
    return _sum(sums, specs, [False] * len(specs))


def directions_are_merged(spec: TensorSpec, method: Method) -> bool:
    return method == "rda" and spec.kind == "parameter" and not spec.embedding and spec.numel > 1


def _directional(specs: Sequence[TensorSpec], method: Method) -> list[bool]:
    return [directions_are_merged(spec, method) for spec in specs]


def _one_by_one(parts: Iterable[Weighted | Sums]) -> Iterator[Weighted]:
    for part in parts:
        if isinstance(part, Sums):
            raise DirectionVanished
        yield part


def _sum(parts: Iterable[Weighted | Sums], specs: Sequence[TensorSpec], directional: Sequence[bool]) -> Sums:
    zeros = [torch.zeros(spec.shape, dtype=torch.float32 if spec.floating else getattr(torch, spec.dtype)) for spec in specs]
    sums = Sums(unit=0.0, total=0.0, heaviest=0.0, tensors=zeros, radii=[0.0] * len(specs))
    for part in parts:
        if isinstance(part, Sums):
            _add_sums(sums, part, specs)
        else:
            _add(sums, part, specs, directional)
    return sums


def _add(sums: Sums, contribution: Weighted, specs: Sequence[TensorSpec], directional: Sequence[bool]) -> None:
    share = sums.weigh(contribution.weight, specs)
    sums.total += share
    for i, tensor in enumerate(contribution.tensors):
        scale = share * contribution.clips.get(i, 1.0)
        if not specs[i].floating:
            if contribution.weight > sums.heaviest:
                sums.tensors[i].copy_(tensor)
        elif specs[i].kind == "buffer":
            sums.tensors[i].copy_(blend(sums.tensors[i], tensor, share / sums.total))
        elif directional[i]:
            sums.radii[i] += scale * contribution.norms[i]
            if contribution.norms[i] > _NOTHING:
                sums.tensors[i].add_(tensor, alpha=share / contribution.norms[i])
        else:
            sums.tensors[i].add_(tensor, alpha=scale)
    sums.heaviest = max(sums.heaviest, contribution.weight)


def _add_sums(sums: Sums, part: Sums, specs: Sequence[TensorSpec]) -> None:
    scale = sums.weigh(part.unit, specs)
    sums.total += scale * part.total
    for i, tensor in enumerate(part.tensors):
        if specs[i].kind == "parameter":
            sums.tensors[i].add_(tensor, alpha=scale)
        elif specs[i].floating:
            sums.tensors[i].copy_(blend(sums.tensors[i], tensor, scale * part.total / sums.total))
        elif part.heaviest > sums.heaviest:
            sums.tensors[i].copy_(tensor)
        sums.radii[i] += scale * part.radii[i]
    sums.heaviest = max(sums.heaviest, part.heaviest)


def blend(held: Tensor, value: Tensor, share: float) -> Tensor:
    """``held``, of a floating type, moved by ``share`` of its way to ``value``.

    Where both are the same the result is so too, to the last bit: most buffers are constants. What is not finite gives
    way to what is: the extremes that an observer has seen are infinite until it has seen any.
    """
    if share >= 1:
        return value
    return torch.where(value.isfinite(), torch.where(held.isfinite(), held + share * (value - held), value), held)


def is_sound(tensor: Tensor, norm: float, spec: TensorSpec, before: Tensor) -> bool:
    """Whether what is offered of a tensor is finite. A buffer may be what it was ``before`` all the same: -inf in a mask, say.

    ``norm`` is that of :func:`norms`.
    """
    if spec.kind == "parameter":
        return math.isfinite(norm)
    return not spec.floating or bool((tensor.isfinite() | (tensor == before) | (tensor.isnan() & before.isnan())).all())


def vector_norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float32))


def norms(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[float]:
    """L2 norm of each delta, 0 for buffers."""
    return [vector_norm(tensor) if spec.kind == "parameter" else 0.0 for tensor, spec in zip(tensors, specs, strict=True)]
