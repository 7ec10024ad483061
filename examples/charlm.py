"""A small character-level GPT and the text it is trained on: what the examples have in common.

The text is Python's own help on its language (``pydoc_data.topics``), which every CPython carries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


def read_text(path: str | None = None) -> bytes:
    """The bytes of the file at ``path``, or Python's help topics."""
    if path is not None:
        return Path(path).read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


class Windows(Dataset[Tensor]):
    """All windows of ``length + 1`` bytes of a text, ``stride`` apart."""

    def __init__(self, text: bytes, length: int, stride: int = 1) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length
        self._stride = stride

    def __len__(self) -> int:
        return (len(self._text) - self._length - 1) // self._stride

    def __getitem__(self, index: int) -> Tensor:
        begin = index * self._stride
        return self._text[begin : begin + self._length + 1].long()


class TextData(LightningDataModule):
    """The first 95 % of a text to train on, in random order, and the rest to validate on."""

    def __init__(self, text: str | None = None, length: int = 64, batch_size: int = 16) -> None:
        super().__init__()
        self.text = text
        self.length = length
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        text = read_text(self.text)
        cut = len(text) * 95 // 100
        self._train = Windows(text[:cut], self.length)
        self._validation = Windows(text[cut:], self.length, stride=self.length)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self._validation, 64)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention_in(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class CharGPT(LightningModule):
    """Predicts the next byte. ``training_step`` takes windows of ``length + 1`` bytes, one in a row."""

    def __init__(self, width: int = 96, layers: int = 3, heads: int = 4, length: int = 64, lr: float = 2e-3, warmup: int = 20) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, windows: Tensor) -> Tensor:
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], betas=(0.9, 0.95), weight_decay=0.1)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.hparams["warmup"]))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
