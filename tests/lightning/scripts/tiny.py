"""A small model, data that tells which samples were drawn, and nodes that live quickly: for tests and their scripts."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gradientmail_torch import DecoupledDiLoCo

QUICK: dict[str, Any] = {"poll_interval": 0.05, "lease": 3.0}
"""Times of a node in a test."""
ALGORITHM = DecoupledDiLoCo(sync_every=2, fragments=2, wire="fp32", commit_wire="fp32")


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is its own index and four numbers that belong to it."""

    def __init__(self, size: int = 32) -> None:
        self.inputs = torch.rand(size, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(index), self.inputs[index]


def numbers(size: int = 32, batch_size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(size), batch_size, **{"shuffle": True, **options})


class Tiny(LightningModule):
    """Learns to sum four numbers."""

    def __init__(self, lr: float = 0.1, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(4, 3), middle or nn.Tanh(), nn.Linear(3, 1))
        self.seen: list[int] = []
        """Indices of the samples trained on, in order."""
        self.first: str = ""
        """Digest of the parameters at the first training step."""

    def loss(self, batch: Any) -> Tensor:
        _, inputs = batch
        return (self.layers(inputs).squeeze(-1) - inputs.sum(-1)).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.first = self.first or digest(self)
        self.seen += batch[0].tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch[0]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters, whole."""
    return {name: whole(parameter).detach().clone() for name, parameter in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(model: nn.Module) -> str:
    """A hash of all parameters, to the last bit."""
    hashed = hashlib.sha256()
    for name, tensor in parameters(model).items():
        hashed.update(name.encode() + tensor.float().cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def quiet_trainer(**options: Any) -> Trainer:
    """A Trainer on one CPU that writes nothing."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0, **silent, **options})
