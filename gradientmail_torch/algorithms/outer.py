"""The outer optimizer: what a commit does with the merged delta."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.messages import TensorSpec


@dataclass(frozen=True, kw_only=True)  # without slots, which jsonargparse cannot read defaults from
class OuterSGD:
    """SGD on the merged delta, which stands for the negative gradient; optionally with (Nesterov) momentum.

    With ``lr=1`` and ``momentum=0``, the default, a commit is the merged parameters. DiLoCo's 0.7 and 0.9
    (arXiv 2311.08105) helps long pre-training and is unsafe for short runs: a persistent direction is amplified
    lr / (1 − momentum) times. ``warmup`` lets momentum grow as 1 − 1/(r+1) with the round r.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    warmup: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.lr <= 10:
            raise ConfigError(f"outer lr must be above 0 and at most 10, not {self.lr}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer momentum must be at least 0 and below 1, not {self.momentum}")

    @property
    def stateful(self) -> bool:
        return self.momentum > 0

    def step(
        self, values: Sequence[Tensor], deltas: Sequence[Tensor], state: Sequence[Tensor] | None, specs: Sequence[TensorSpec], version: int
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """The fragment's next value and the optimizer's next state, as new fp32 tensors.

        ``deltas`` are of :func:`~gradientmail_torch.algorithms.merge.merge`: buffers come as values and are
        taken as they are. ``state`` is one momentum buffer for each parameter; None before the first step.
        """
        momentum = min(self.momentum, 1.0 - 1.0 / version) if self.warmup else self.momentum
        after: list[Tensor] = []
        buffers: list[Tensor] = []
        for value, delta, spec in zip(values, deltas, specs, strict=True):
            if spec.kind == "buffer":
                after.append(delta)
                continue
            update = delta
            if self.stateful:
                velocity = delta.clone() if state is None else state[len(buffers)].mul(momentum).add_(delta)
                buffers.append(velocity)
                update = delta.add(velocity, alpha=momentum) if self.nesterov else velocity
            after.append(torch.add(value, update, alpha=self.lr))
        return after, buffers if self.stateful else None
