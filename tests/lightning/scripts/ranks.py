"""Two ranks of one node, launched by torchrun: runs scenarios one after the other and writes down what each rank saw.

torchrun --standalone --nproc-per-node=2 ranks.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from tiny import ALGORITHM, QUICK, Tiny, digest, numbers, quiet_trainer
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradientmail_torch import GradientMailDDPStrategy, GradientMailFSDP2Strategy, Session
from gradientmail_torch.patterns.barrier import Barrier

Report = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path], Report]] = {}


def scenario(run: Callable[[Path], Report]) -> Callable[[Path], Report]:
    SCENARIOS[run.__name__] = run
    return run


class Sharded(Tiny):
    """Tiny, sharded over the ranks of the node."""

    def configure_model(self) -> None:
        if not getattr(self, "_sharded", False):
            self._sharded = True
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


def node(kind: type, mailbox: Path, **options: Any) -> Any:
    return kind(str(mailbox), **{"learner_id": "node", "algorithm": ALGORITHM, **QUICK, **options})


def fit(strategy: Any, model: Tiny, mailbox: Path, *, data: Any = None, **options: Any) -> Report:
    """Train, and report what all scenarios have in common."""
    trainer = quiet_trainer(**{"strategy": strategy, "devices": 2, "max_epochs": 2, **options})
    trainer.fit(model, data or numbers(), numbers(shuffle=False))
    stats = getattr(strategy, "stats", None)
    return {
        "rank": trainer.global_rank,
        "first": model.first,
        "seen": model.seen,
        "final": digest(model),
        "stats": None if stats is None else {"steps": stats.steps, "samples": stats.samples, "learner_id": stats.learner_id},
    }


# --- both strategies ------------------------------------------------------------------------------------


@scenario
def ddp(mailbox: Path) -> Report:
    return fit(node(GradientMailDDPStrategy, mailbox), Tiny(), mailbox)


@scenario
def fsdp2(mailbox: Path) -> Report:
    return fit(node(GradientMailFSDP2Strategy, mailbox), Sharded(), mailbox)


class Other:
    """Another learner of the run, in a thread of rank 0, that trains as long as the node does."""

    def __init__(self, mailbox: Path, rank: int) -> None:
        self._stop = threading.Event()
        self._joined = threading.Event()
        self._mailbox = str(mailbox)
        self._thread = threading.Thread(target=self._train)
        if rank == 0:
            self._thread.start()
            self._joined.wait()

    def _train(self) -> None:
        model = nn.Module()
        model.layers = Tiny().layers
        with Session(model, mailbox=self._mailbox, learner_id="other", algorithm=ALGORITHM, **QUICK) as session:
            self._joined.set()
            while not self._stop.wait(0.01):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.001)
                session.step(samples=1)
        Barrier(self._mailbox, "other", poll_interval=0.05).wait("done", parties=2)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()


class StopsOther(Callback):
    def __init__(self, other: Other) -> None:
        self._other = other

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == trainer.max_epochs - 1:
            self._other._stop.set()


def beside_another(kind: type, model: Tiny, mailbox: Path) -> Report:
    other = Other(mailbox, int(os.environ["RANK"]))
    report = fit(node(kind, mailbox, done_parties=2), model, mailbox, max_epochs=6, callbacks=[StopsOther(other)])
    other.stop()
    return report


@scenario
def ddp_beside_another(mailbox: Path) -> Report:
    return beside_another(GradientMailDDPStrategy, Tiny(), mailbox)


@scenario
def fsdp2_beside_another(mailbox: Path) -> Report:
    return beside_another(GradientMailFSDP2Strategy, Sharded(), mailbox)


def main() -> None:
    directory = Path(sys.argv[1])
    names = sys.argv[2:] or list(SCENARIOS)
    for name in names:
        seed_everything(1, verbose=False)
        print("---", name, flush=True)
        report = SCENARIOS[name](directory / name)
        rank = torch.distributed.get_rank()
        (directory / f"{name}-{rank}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
