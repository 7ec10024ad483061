"""Fine-tuning with low-rank adapters (LoRA, arXiv 2106.09685): the base is frozen, so only the adapters travel.

    python examples/cli.py fit --config configs/lora.yaml

What a run holds is what is trainable: of this model about a fortieth. Frozen parameters must be the same on every node, from
the same file or the same seed; nobody compares them.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from charlm import CharGPT
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

ADAPTED = ("attention_in", "attention_out", "up", "down")
"""Layers of a block that get an adapter."""


class Adapted(nn.Module):
    """``base(x) + scale · up(down(x))`` with a frozen ``base``; nothing is added at first, since ``up`` is zero."""

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * functional.linear(functional.linear(x, self.down), self.up)


class AdaptedGPT(CharGPT):
    """A :class:`CharGPT` whose blocks are adapted.

    Args:
        base: the trained model, as ``gradientmail export RUN base.safetensors`` writes it; random, by the seed, unless given.
        rank: of the adapters.
    """

    def __init__(
        self,
        base: str | None = None,
        rank: int = 2,
        scale: float = 1.0,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        length: int = 64,
        lr: float = 2e-3,
        warmup: int = 20,
    ) -> None:
        super().__init__(width, layers, heads, length, lr, warmup)
        if base is not None:
            self.load_state_dict(load_file(Path(base).expanduser()))
        self.requires_grad_(False)
        for block in self.blocks:
            for name in ADAPTED:
                setattr(block, name, Adapted(getattr(block, name), rank, scale))
