"""The work that every method does: a small byte-level GPT on the Python standard library's sources.

Only torch is needed, so that this runs in the environment of every peer. All methods see the same global batches:
the batch of a step is drawn by the run's seed and the step's number, and each of N nodes takes its N-th of the rows.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 128
GLOBAL_ROWS = 16
TOKENS_PER_STEP = GLOBAL_ROWS * CONTEXT
"""Tokens of a global step, over all nodes."""
LEARNING_RATE = 1e-3
WARMUP_SHARE = 0.1
FINAL_SHARE = 0.1
VALIDATION_ROWS = 128


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.attention_in, self.attention_out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp_norm, self.mlp_in, self.mlp_out = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention_in(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))


class ByteGPT(nn.Module):
    """3.32 million parameters, unless given otherwise."""

    def __init__(self, *, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, windows: Tensor) -> Tensor:
        """Mean loss on windows of ``CONTEXT + 1`` bytes, one in a row."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        hidden = self.blocks(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


def make_model(seed: int) -> ByteGPT:
    torch.manual_seed(seed)
    return ByteGPT()


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate at ``step`` of ``steps``, from 0: linear warm-up, then cosine down to a tenth."""
    warm_up = WARMUP_SHARE * steps
    if step < warm_up:
        return (step + 1) / warm_up
    rest = min(1.0, (step - warm_up) / max(1.0, steps - warm_up))
    return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * rest))


def set_rate(optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Set the learning rate for ``step`` of ``steps``, from 0."""
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * schedule(step, steps)


@dataclass(frozen=True)
class Corpus:
    train: Tensor
    validation: Tensor
    digest: str


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    """The standard library of the Python that runs this, tests left out: 19 parts to train on and one to validate."""
    paths = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    text = b"".join(Path(path).read_bytes() for path in paths if "site-packages" not in path and "/test" not in path)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(data) * 19 // 20
    return Corpus(data[:cut], data[cut:], hashlib.sha256(text).hexdigest()[:12])


def batch(step: int, *, seed: int = 0, node: int = 0, nodes: int = 1, shard: tuple[float, float] = (0.0, 1.0)) -> Tensor:
    """The rows of one node in the global batch of a step, drawn from a part of the text (all of it unless given)."""
    train = corpus().train
    begin, end = int(shard[0] * len(train)), int(shard[1] * len(train)) - CONTEXT - 1
    generator = torch.Generator().manual_seed(1_234_567 + 1_000_003 * seed + step)
    offsets = torch.randint(begin, end, (GLOBAL_ROWS,), generator=generator)
    rows = GLOBAL_ROWS // nodes
    return _windows(train, offsets[node * rows : (node + 1) * rows])


def _windows(text: Tensor, offsets: Tensor) -> Tensor:
    return torch.stack([text[begin : begin + CONTEXT + 1] for begin in offsets.tolist()]).long()


@torch.no_grad()
def validation_loss(model: nn.Module, rows: int = VALIDATION_ROWS) -> float:
    """Mean loss on windows of the validation text, the same for all."""
    text = corpus().validation
    offsets = torch.randint(0, len(text) - CONTEXT - 1, (rows,), generator=torch.Generator().manual_seed(99))
    losses = [float(model(part)) * len(part) for part in _windows(text, offsets).split(16)]
    return sum(losses) / rows


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, windows: Tensor, *, precision: str = "fp32") -> float:
    """One optimizer step; returns the loss. With ``bf16`` the forward and backward passes are autocast to it."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = model(windows)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
