"""A plain PyTorch loop as a node of a run: no Lightning, no launcher, two lines more than on one machine.

Start it on each machine, or let it start both nodes here::

    python examples/plain_loop.py --mailbox s3://bucket/run-1 --rank 0 --nodes 2
    python examples/plain_loop.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from several import start_nodes
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_torch import DecoupledDiLoCo, Session, align, open_mailbox
from gradientmail_torch.patterns.barrier import Barrier

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--mailbox", default="out/plain_loop", help="URL of the run's mailbox, or a directory")
parser.add_argument("--rank", type=int, help="which node this is; without it all nodes are started here")
parser.add_argument("--nodes", type=int, default=2)
options = parser.parse_args()
if options.rank is None:
    sys.exit(start_nodes(Path(__file__), options.nodes, options.mailbox))

rank, nodes = options.rank, options.nodes
box = open_mailbox(options.mailbox)
torch.set_num_threads(1)


def spirals(count: int, seed: int) -> TensorDataset:
    """Points of two spirals, with noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    turns = torch.rand(count, generator=generator) * 2
    angle = torch.pi * (turns + labels)
    points = torch.stack([turns * angle.cos(), turns * angle.sin()], dim=1)
    return TensorDataset(points + 0.05 * torch.randn(points.shape, generator=generator), labels)


class Batches(DataLoader[tuple[Tensor, ...]]):
    """A batch's length is its number of samples."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        for _ in range(30):
            for points, labels in super().__iter__():
                yield list(zip(points, labels, strict=True))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[tuple[Tensor, Tensor]]) -> float:
    points, labels = (torch.stack(tensors) for tensors in zip(*batch, strict=True))
    loss = functional.cross_entropy(model(points), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module) -> None:
    points, labels = spirals(1000, seed=99).tensors
    accuracy = (model(points).argmax(dim=1) == labels).float().mean()
    print(
        f"node-{rank}: accuracy of the run {accuracy:.4f}, sum of its weights {sum(float(p.double().sum()) for p in model.parameters())!r}"
    )


model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
algorithm = DecoupledDiLoCo(sync_every=20)
dataloader = Batches(spirals(512, seed=rank), batch_size=32, shuffle=True)  # each node has data of its own

# What follows is all that a node is made of.
barrier = Barrier(mailbox=box, learner_id=f"node-{rank}")

session = Session(model, algorithm=algorithm, mailbox=box, learner_id=f"node-{rank}")
barrier.wait("start", parties=nodes)

with session:
    for batch in dataloader:
        loss = train_step(model, optimizer, batch)
        session.step(samples=len(batch))

barrier.wait("done", parties=nodes, timeout=600)
align(model, mailbox=box)
evaluate(model)
