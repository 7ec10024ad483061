"""What taking part costs the training thread in a step at which nothing is due.

``python -m benchmarks.step_overhead`` measures ``session.step`` alone, and a Trainer's step under Lightning's own
strategies beside ours, on the smallest model, where overhead shows most. ``--ranks`` does the second for two
processes of one node (DDP, gloo). Processor time of the training thread stands beside wall time, since it hardly
depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from gradientmail_torch import DecoupledDiLoCo, GradientMailDDPStrategy, GradientMailStrategy, Session

NEVER = DecoupledDiLoCo(sync_every=10**9)
STEPS, REPEATS, WARM_UP = 400, 5, 50


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Wall and processor time of each step, in seconds."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.marks.append((time.perf_counter(), time.thread_time()))

    def medians_us(self) -> tuple[float, float]:
        marks = self.marks[WARM_UP:]
        wall = [b[0] - a[0] for a, b in itertools.pairwise(marks)]
        return 1e6 * statistics.median(wall), 1e6 * (marks[-1][1] - marks[0][1]) / (len(marks) - 1)


def session_step(repeats: int = 20_000) -> tuple[float, float]:
    """Median and mean processor time of ``session.step``, in microseconds."""
    with tempfile.TemporaryDirectory() as directory:
        session = Session(nn.Linear(32, 2), mailbox=directory, learner_id="node", algorithm=NEVER)
        with session:
            session.step(samples=8)
            taken, cpu_began = [], time.thread_time()
            for _ in range(repeats):
                began = time.perf_counter()
                session.step(samples=8)
                taken.append(time.perf_counter() - began)
            cpu = time.thread_time() - cpu_began
            session.leave(timeout=0.0, contribute=False)
    return 1e6 * statistics.median(taken), 1e6 * cpu / repeats


def trainer_step(strategy: Any, devices: int) -> tuple[float, float]:
    clock = Clock()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_steps=STEPS, callbacks=[clock], **quiet)
    data = DataLoader(TensorDataset(torch.randn(STEPS * 8 * devices, 32)), 8, shuffle=True)
    trainer.fit(Small(), data)
    return clock.medians_us()


def compare(devices: int) -> None:
    """Turn about, so that both meet the same machine."""
    ours = GradientMailStrategy if devices == 1 else GradientMailDDPStrategy
    wall: dict[str, list[float]] = {"Lightning": [], "GradientMail": []}
    cpu: dict[str, list[float]] = {"Lightning": [], "GradientMail": []}
    for repeat in range(REPEATS):
        with tempfile.TemporaryDirectory() as directory:
            mailbox = f"{directory}/{repeat}" if devices == 1 else f"{os.environ['OVERHEAD_DIRECTORY']}/{repeat}"
            strategies = {
                "Lightning": "auto" if devices == 1 else DDPStrategy(),
                "GradientMail": ours(mailbox, NEVER, "node", close_timeout=60.0),
            }
            for name, strategy in strategies.items():
                step = trainer_step(strategy, devices)
                wall[name].append(step[0])
                cpu[name].append(step[1])
    if int(os.environ.get("RANK", "0")) == 0:
        for kind, taken in (("wall", wall), ("processor", cpu)):
            medians = {name: statistics.median(values) for name, values in taken.items()}
            added = medians["GradientMail"] - medians["Lightning"]
            print(f"{devices} rank(s), {kind:9} time of a step, us: Lightning {medians['Lightning']:.0f}, added by ours {added:+.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", action="store_true", help="two ranks of one node")
    options = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric", "gradientmail_torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        compare(devices=2)
    elif options.ranks:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "benchmarks.step_overhead"]
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(launcher, env={**os.environ, "OVERHEAD_DIRECTORY": directory, "OMP_NUM_THREADS": "1"}, check=True)
    else:
        median, cpu = session_step()
        print(f"session.step with nothing due, us: median {median:.1f}, processor time {cpu:.1f} (target: under 20)")
        compare(devices=1)


if __name__ == "__main__":
    main()
