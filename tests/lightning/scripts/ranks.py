"""Two ranks of one node, launched by torchrun: runs scenarios one after the other and writes down what each rank saw.

Usage: torchrun --standalone --nproc-per-node=2 ranks.py DIRECTORY [SCENARIO…]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from tiny import ALGORITHM, QUICK, Tiny, digest, numbers, quiet_trainer
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradientmail_torch import DecoupledDiLoCo, DiLoCo, GradientMailDDPStrategy, GradientMailFSDP2Strategy, Session
from gradientmail_torch.callbacks import (
    AlignOnValidation,
    DistributedEvaluation,
    DoneBarrier,
    EpochBarrier,
    GradientMailCallback,
    StartBarrier,
)
from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import GradientMailError
from gradientmail_torch.lightning.parameters import reshard
from gradientmail_torch.lightning.seeding import learner_seed
from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.session.run import Run

Report = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path], Report]] = {}
RANK = int(os.environ.get("RANK", "0"))


def scenario(run: Callable[[Path], Report]) -> Callable[[Path], Report]:
    SCENARIOS[run.__name__] = run
    return run


class Sharded(Tiny):
    """Tiny, with the layers sharded over the ranks of the node."""

    def configure_model(self) -> None:
        if not hasattr(self, "sharded"):
            self.sharded = True
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


MODELS = {GradientMailDDPStrategy: Tiny, GradientMailFSDP2Strategy: Sharded}


def node(kind: type, mailbox: Path | str, **options: Any) -> Any:
    return kind(**{"mailbox": str(mailbox), "learner_id": "node", "algorithm": ALGORITHM, **QUICK, **options})


def fit(strategy: Any, model: Tiny, *, ckpt_path: Path | None = None, **options: Any) -> Report:
    """Train, and report what all scenarios have in common."""
    trainer = quiet_trainer(**{"strategy": strategy, "devices": 2, **options})
    trainer.fit(model, numbers(), numbers(shuffle=False), ckpt_path=ckpt_path)
    reshard(model)
    stats = getattr(strategy, "stats", None)
    return {
        "rank": trainer.global_rank,
        "first": model.first,
        "seen": model.seen,
        "final": digest(model),
        "steps": stats and stats.steps,
        "samples": stats and stats.samples,
    }


def both(run: Callable[[type, Path], Report]) -> None:
    """Register a scenario for either strategy."""
    for name, kind in (("ddp", GradientMailDDPStrategy), ("fsdp2", GradientMailFSDP2Strategy)):
        SCENARIOS[f"{name}_{run.__name__}"] = lambda mailbox, kind=kind: run(kind, mailbox)


# --- either strategy -----------------------------------------------------------------------------------


@both
def plain(kind: type, mailbox: Path) -> Report:
    return fit(node(kind, mailbox), MODELS[kind]())


@both
def accumulated_clipped_and_seldom(kind: type, mailbox: Path) -> Report:
    clipping = "norm" if kind is GradientMailDDPStrategy else "value"
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "gradient_clip_algorithm": clipping}
    return fit(node(kind, mailbox, exchange_every=3), MODELS[kind](), max_epochs=4, **options)


@both
def in_bf16(kind: type, mailbox: Path) -> Report:
    """Whole parameters in bf16, which move by less or more than they are told to."""
    with Together(mailbox) as other:
        return fit(node(kind, mailbox, done_parties=2), MODELS[kind](), max_epochs=4, precision="bf16-true", callbacks=[other])


@both
def beside_another(kind: type, mailbox: Path) -> Report:
    with Together(mailbox) as other:
        return fit(node(kind, mailbox, done_parties=2), MODELS[kind](), max_epochs=4, callbacks=[other])


class Together(Callback):
    """Another learner of the run, in a thread of rank 0, which founds the run and trains until the node's last epoch ends."""

    def __init__(self, mailbox: Path) -> None:
        self._mailbox = str(mailbox)
        self._over, self._joined = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._train)

    def __enter__(self) -> Together:
        if RANK == 0:
            self._thread.start()
            self._joined.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if RANK == 0:
            self._thread.join()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == trainer.max_epochs - 1:
            self._over.set()

    def _train(self) -> None:
        model = nn.Module()
        model.layers = Tiny().layers
        with Session(model, mailbox=self._mailbox, learner_id="other", algorithm=ALGORITHM, **QUICK) as session:
            self._joined.set()
            while not self._over.wait(0.01):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.001)
                session.step(samples=1)
        Barrier(self._mailbox, "other", poll_interval=0.05).wait("done", parties=2)


@both
def synchronous(kind: type, mailbox: Path) -> Report:
    return fit(node(kind, mailbox, algorithm=DiLoCo(sync_every=2, parties=1, fragments=2)), MODELS[kind]())


@both
def callbacks(kind: type, mailbox: Path) -> Report:
    """Every barrier callback beside the strategy, and validations of the run's parameters."""
    watch = Watches()
    barriers = [StartBarrier(1, name="s"), EpochBarrier(1), DoneBarrier(1, name="d")]
    report = fit(node(kind, mailbox), MODELS[kind](), max_epochs=2, callbacks=[*barriers, AlignOnValidation(), watch])
    return {**report, "validations": watch.seen, "barriers": sorted(path.name for path in (mailbox / "barriers").iterdir())}


class Watches(Callback):
    """The parameters before, in and after each validation."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        self._before = digest(pl_module)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *more: Any) -> None:
        if batch_idx == 0:
            self.seen.append([self._before, digest(pl_module)])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen[-1].append(digest(pl_module))


@both
def evaluated(kind: type, mailbox: Path) -> Report:
    """The run's parameters, scored at the end of each epoch and at the end of fit by both ranks together."""
    callback = DistributedEvaluation(every_n_epochs=1, pieces=3, poll_interval=0.05)
    watch = Scored()
    report = fit(node(kind, mailbox), MODELS[kind](), max_epochs=2, limit_val_batches=0, callbacks=[Before(watch), callback, watch])
    return {**report, "scored": watch.scored, "put back": watch.put_back, "end": callback.metrics}


class Scored(Callback):
    """What an evaluation at the end of an epoch has found, and whether the node's own parameters are back."""

    def __init__(self) -> None:
        self.before = ""
        self.scored: list[float] = []
        self.put_back: list[bool] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.scored.append(float(trainer.callback_metrics["run_val_loss"]))
        self.put_back.append(digest(pl_module) == self.before)


class Before(Callback):
    """Comes before the evaluation, and tells ``watch`` of the parameters."""

    def __init__(self, watch: Scored) -> None:
        self._watch = watch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        reshard(pl_module)
        self._watch.before = digest(pl_module)


@both
def failing_validation(kind: type, mailbox: Path) -> Report:
    """The parameters that AlignOnValidation took away for a moment are put back also on the way out."""

    class Fails(Watches):
        def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
            super().on_validation_batch_start(trainer, pl_module, *arguments)
            raise ZeroDivisionError

        def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
            self.seen[-1].append(digest(pl_module))

    watch = Fails()
    try:
        untold = DecoupledDiLoCo(sync_every=1000)  # so that the run's parameters are not the node's
        fit(node(kind, mailbox, algorithm=untold), MODELS[kind](), callbacks=[AlignOnValidation(), watch])
    except ZeroDivisionError:
        return {"seen": watch.seen[-1]}
    raise AssertionError


@both
def resumed(kind: type, mailbox: Path) -> Report:
    checkpoints = ModelCheckpoint(mailbox.with_suffix(".checkpoints"), filename="kept")
    options = {"enable_checkpointing": True, "callbacks": [checkpoints]}
    fit(node(kind, mailbox), MODELS[kind](), **options)
    between = fit(node(kind, mailbox, learner_id="meanwhile"), MODELS[kind]())
    report = fit(node(kind, mailbox), MODELS[kind](), max_epochs=2, ckpt_path=Path(checkpoints.best_model_path), **options)
    return {**report, "run": between["final"]}


@both
def refused(kind: type, mailbox: Path) -> Report:
    """What rank 0 hears of the mailbox is raised on every rank."""
    try:
        fit(node(kind, "ftp://host/run"), MODELS[kind]())
    except GradientMailError as error:
        return {"error": type(error).__name__, "text": str(error)}
    raise AssertionError


@both
def told_to_stop(kind: type, mailbox: Path) -> Report:
    """A SIGTERM to either rank alone ends both at the same step, and what they have done is in the run."""
    return {str(rank): stopped(kind, mailbox.with_name(f"{mailbox.name}-{rank}"), Told(rank)) for rank in (0, 1)}


@scenario
def told_to_stop_at_a_barrier(mailbox: Path) -> Report:
    """Rank 1 waits for rank 0, which waits for another node: only when rank 0 asks can rank 1's handler run."""
    watch = threading.Thread(target=tell_when, args=(mailbox / "barriers" / "start",))
    if RANK == 1:
        watch.start()
    report = stopped(GradientMailDDPStrategy, mailbox, Told(None), start_parties=2)
    if RANK == 1:
        watch.join()
    return report


def stopped(kind: type, mailbox: Path, told: Callback, **options: Any) -> Report:
    strategy = node(kind, mailbox, **options)
    try:
        fit(strategy, MODELS[kind](), max_epochs=100, callbacks=[told])
    except SystemExit as ended:
        return {"code": ended.code, "steps": strategy.stats and strategy.stats.steps, "merged": steps_in_run(mailbox)}
    raise AssertionError("it went on")


class Told(Callback):
    """Sends a SIGTERM to one rank."""

    def __init__(self, rank: int | None) -> None:
        self._rank = rank

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._rank == RANK and batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def tell_when(path: Path) -> None:
    while not path.exists():
        SYSTEM_CLOCK.sleep(0.02)
    os.kill(os.getpid(), signal.SIGTERM)


def steps_in_run(mailbox: Path) -> int:
    """Steps in the commits of the first fragment."""
    run = Run.open(open_mailbox(mailbox))
    assert run is not None
    steps, version = 0, 1
    while (commit := run.commit(0, version)) is not None:
        steps += sum(merged.steps for merged in commit.merged)
        version += 1
    return steps


# --- DDP alone -----------------------------------------------------------------------------------------


@scenario
def made_up_name(mailbox: Path) -> Report:
    """Each rank would make up another, and so deal the samples by another seed."""
    strategy = node(GradientMailDDPStrategy, mailbox, learner_id=None)
    report = fit(strategy, Tiny())
    return {**report, "learner_id": strategy.learner_id, "seed": learner_seed(strategy.learner_id)}


@scenario
def by_hand(mailbox: Path) -> Report:
    class ByHand(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layers[0], self.layers[2])]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            for optimizer in self.optimizers():
                optimizer.step()

    return fit(node(GradientMailDDPStrategy, mailbox), ByHand())


@scenario
def compiled(mailbox: Path) -> Report:
    return fit(node(GradientMailDDPStrategy, mailbox), torch.compile(Tiny(), backend="eager"))


@scenario
def plain_strategy(mailbox: Path) -> Report:
    """Lightning's own DDP, with callbacks for everything."""
    part = GradientMailCallback(str(mailbox), learner_id="node", algorithm=ALGORITHM, **QUICK)
    report = fit(DDPStrategy(), Tiny(), callbacks=[part, AlignOnValidation(), EpochBarrier(1), DoneBarrier(1)])
    stats = part.stats
    return {**report, "steps": stats and stats.steps, "samples": stats and stats.samples}


@scenario
def plain_strategy_without_a_run(mailbox: Path) -> Report:
    place = {"mailbox": str(mailbox), "learner_id": "node"}
    barriers = [StartBarrier(1, **place), EpochBarrier(1, **place), DoneBarrier(1, **place)]
    report = fit(DDPStrategy(), Tiny(), callbacks=barriers)
    return {**report, "barriers": sorted(path.name for path in (mailbox / "barriers").iterdir())}


def main() -> None:
    directory = Path(sys.argv[1])
    for name in sys.argv[2:] or list(SCENARIOS):
        seed_everything(1, verbose=False)
        print("---", name, flush=True)
        report = SCENARIOS[name](directory / name)
        (directory / f"{name}-{RANK}.json").write_text(json.dumps(report))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that has used FSDP2 on the way out (torch 2.13)


if __name__ == "__main__":
    main()
