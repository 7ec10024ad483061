"""A Lightning Fabric loop as a node of a run: Fabric sets up device and precision, a Session does the rest.

    python examples/fabric_loop.py --mailbox s3://bucket/run-1 --rank 0 --nodes 2      # on each machine
    python examples/fabric_loop.py                                                     # or both nodes here

The session takes the model itself, not Fabric's wrapper of it, and is told of each optimizer step. One process a
node; for several GPUs in a node use the Lightning strategies.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from several import start_nodes
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_torch import DecoupledDiLoCo, Session, align
from gradientmail_torch.patterns.barrier import Barrier

TRUE_WEIGHTS = torch.linspace(-1, 1, 16).unsqueeze(1)
ACCUMULATE = 2


def data(rank: int) -> TensorDataset:
    """Noisy samples of a linear map, other ones on each node."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(1024, 16, generator=generator)
    return TensorDataset(x, x @ TRUE_WEIGHTS + 0.01 * torch.randn(1024, 1, generator=generator))


def train(rank: int, nodes: int, mailbox: str) -> None:
    torch.set_num_threads(1)
    seed_everything(rank, verbose=False)
    fabric = Fabric(accelerator="auto", devices=1, precision="32-true")
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(DataLoader(data(rank), batch_size=16, shuffle=True))

    barrier = Barrier(mailbox, f"node-{rank}")
    session = Session(net, mailbox=mailbox, learner_id=f"node-{rank}", algorithm=DecoupledDiLoCo(sync_every=10), poll_interval=0.2)
    barrier.wait("start", parties=nodes)
    with session:
        for _ in range(15):
            samples = 0
            for place, (x, y) in enumerate(loader, start=1):
                stepping = place % ACCUMULATE == 0
                with fabric.no_backward_sync(model, enabled=not stepping):
                    fabric.backward(functional.mse_loss(model(x), y) / ACCUMULATE)
                samples += len(x)
                if stepping:
                    optimizer.step()
                    optimizer.zero_grad()
                    session.step(samples=samples)
                    samples = 0
    barrier.wait("done", parties=nodes, timeout=600)
    versions = align(net, mailbox=mailbox)
    x, y = (tensor.to(fabric.device) for tensor in data(99).tensors)
    with torch.no_grad():
        print(f"node-{rank}: loss of the run {functional.mse_loss(net(x), y).item()!r} at versions {versions}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", default="out/fabric_loop", help="URL of the run's mailbox, or a directory")
    parser.add_argument("--rank", type=int, help="which node this is; without it all nodes are started here")
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(start_nodes(Path(__file__), options.nodes, options.mailbox))
    train(options.rank, options.nodes, options.mailbox)


if __name__ == "__main__":
    main()
