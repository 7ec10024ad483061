"""Training data shared by the nodes: every item on one node at a time, every sample on one rank."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from gradientmail_torch import GradientMailStrategy
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.lightning.data import SharedQueueDataset, SharedQueueLoader, deal
from gradientmail_torch.lightning.datamodule import SharedQueueDataModule
from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.patterns.queue import Progress, SharedQueue

SCRIPTS = Path(__file__).with_name("scripts")


def load(item: list[int]) -> Iterator[int]:
    yield from range(*item)


def queue(box: Path | str, learner_id: str = "node-0", **options: Any) -> SharedQueue:
    """Six items of five samples: the numbers below 30."""
    found = SharedQueue("train-0", box, learner_id, **{"poll_interval": 0.05, **options})
    found.fill([[start, start + 5] for start in range(0, 30, 5)])
    return found


# --- ranks ---------------------------------------------------------------------------------------------


@given(size=st.integers(0, 60), batch_size=st.integers(1, 7), ranks=st.integers(1, 5))
def test_ranks_get_disjoint_parts_and_equally_many_batches(size: int, batch_size: int, ranks: int) -> None:
    parts = [list(deal(range(size), batch_size, rank, ranks)) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1
    seen = Counter(sample for part in parts for batch in part for sample in batch)
    assert set(seen) == set(range(size))
    assert sum(seen.values()) - size < ranks, "only to even the last batch out is a sample used twice"
    assert all(len(batch) == batch_size for part in parts for batch in part[:-1])
    assert all(1 <= len(part[-1]) <= batch_size for part in parts if part)


def test_the_ranks_of_a_node_share_its_items_and_its_evaluations(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        SCRIPTS / "queue_ranks.py",
        tmp_path,
        2,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [report["metrics"] for report in reports] == [{"mean": 11.0, "batches": 12.0}] * 2, "each rank's own batches, counted once"
    batches = [report["batches"] for report in reports]
    assert len(batches[0]) == len(batches[1]) == 2 * 5 * 2, "two epochs, five items, two batches on each rank"
    for epoch in (slice(0, 10), slice(10, 20)):
        seen = [Counter(sample for batch in part[epoch] for sample in batch) for part in batches]
        assert set(seen[0]) | set(seen[1]) == set(range(35))
        assert not set(seen[0]) & set(seen[1])
    first, second = ([batch[0] // 7 for batch in batches[0][epoch]] for epoch in (slice(0, 10), slice(10, 20)))
    assert first != second, "each epoch has an order of its own"


# --- datasets and loaders ------------------------------------------------------------------------------


def test_a_dataset_serves_a_plain_data_loader(tmp_path: Path) -> None:
    shards = queue(tmp_path)
    loader = DataLoader(SharedQueueDataset(shards, load), batch_size=4)
    assert torch.cat(list(loader)).tolist() == list(range(30))
    assert shards.progress() == Progress(done=6, claimed=0, left=0, failed=0)


def test_workers_of_a_plain_data_loader_are_refused_with_the_cure(tmp_path: Path) -> None:
    loader = DataLoader(SharedQueueDataset(queue(tmp_path), load), batch_size=4, num_workers=1)
    with pytest.raises(ConfigError, match=r"use dataset\.loader"):
        next(iter(loader))
    gc.collect()  # ends the worker


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_loader_gives_every_sample_once_in_batches_of_its_item(workers: int, mailbox_url: str) -> None:
    shards = queue(mailbox_url)
    batches = [batch.tolist() for batch in SharedQueueDataset(shards, load).loader(2, num_workers=workers)]
    assert batches == [batch for start in range(0, 30, 5) for batch in ([start, start + 1], [start + 2, start + 3], [start + 4])]
    assert shards.progress() == Progress(done=6, claimed=0, left=0, failed=0)


def test_an_item_is_done_when_the_batch_after_its_last_one_is_asked_for(tmp_path: Path) -> None:
    shards = queue(tmp_path)
    done = [shards.progress().done for _ in SharedQueueDataset(shards, load).loader(5)]
    assert done == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_not_done_goes_back_when_the_loop_is_left(workers: int, tmp_path: Path) -> None:
    for batch in (loop := iter(SharedQueueDataset(queue(tmp_path), load).loader(2, num_workers=workers))):
        if batch.tolist() == [10, 11]:
            break
    loop.close()  # type: ignore[attr-defined]
    rest = torch.cat(list(SharedQueueDataset(queue(tmp_path, "node-1"), load).loader(2)))
    assert sorted(rest.tolist()) == list(range(10, 30))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_items_of_a_node_that_is_gone_are_loaded_too(workers: int, mailbox_url: str) -> None:
    gone = queue(mailbox_url, "gone").open()
    held = gone.take()
    assert held is not None
    shards = queue(mailbox_url)
    loop = iter(SharedQueueDataset(shards, load).loader(5, num_workers=workers))
    seen = [next(loop).tolist() for _ in range(5)]
    gone.close()
    seen += [batch.tolist() for batch in loop]
    assert seen == [[*range(start, start + 5)] for start in (5, 10, 15, 20, 25, 0)]


def test_an_error_of_load_ends_the_loop_and_gives_the_item_back(tmp_path: Path) -> None:
    def broken(item: list[int]) -> Iterator[int]:
        if item[0] == 10:
            raise OSError("no such shard")
        return load(item)

    with pytest.raises(OSError, match="no such shard"):
        list(SharedQueueDataset(queue(tmp_path), broken).loader(5))
    assert queue(tmp_path).progress() == Progress(done=2, claimed=1, left=3, failed=0)
    assert len(list(SharedQueueDataset(queue(tmp_path, "node-1"), load).loader(5))) == 4


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": 1.5}, {"num_workers": -1}, {"prefetch_items": 0}])
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SharedQueueLoader(SharedQueueDataset(queue(tmp_path), load), **{"batch_size": 1, **options})


# --- in a Trainer --------------------------------------------------------------------------------------


class Ranges(SharedQueueDataModule):
    def items(self) -> list[list[int]]:
        return [[start, start + 5] for start in range(0, 30, 5)]

    def load(self, item: list[int]) -> Iterator[int]:
        return load(item)


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += batch.tolist()
        return self.layer(batch.float().unsqueeze(1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def trainer(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def data(box: Path | str, learner_id: str | None = "node-0", **options: Any) -> Ranges:
    return Ranges(**{"batch_size": 2, "mailbox": str(box), "learner_id": learner_id, "poll_interval": 0.05, **options})


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_hands_every_item_out_once(workers: int, mailbox_url: str) -> None:
    model = Module()
    trainer(max_epochs=2).fit(model, datamodule=data(mailbox_url, seed=3, num_workers=workers))
    first, second = model.seen[:30], model.seen[30:]
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second != list(range(30))


def test_mailbox_and_learner_id_are_those_of_the_strategy(tmp_path: Path) -> None:
    model, strategy = Module(), GradientMailStrategy(str(tmp_path), learner_id="node-7", poll_interval=0.05)
    trainer(max_epochs=1, strategy=strategy).fit(model, datamodule=Ranges(batch_size=2, poll_interval=0.05))
    assert sorted(model.seen) == list(range(30))
    owners = {outcome.owner.rpartition("-")[0] for outcome in SharedQueue("train-0", tmp_path, "reader").outcomes()}
    assert owners == {"node-7"}


def test_a_node_that_comes_when_an_epoch_is_over_goes_on_with_the_next(tmp_path: Path) -> None:
    first, late = Module(), Module()
    trainer(max_epochs=1).fit(first, datamodule=data(tmp_path))
    trainer(max_epochs=2).fit(late, datamodule=data(tmp_path, "node-1"))
    assert first.seen == late.seen == list(range(30)), "one of them trained on epoch 0, the other on epoch 1"


@pytest.mark.filterwarnings("ignore:.*fast_dev_run.*")
def test_a_trial_run_takes_nothing_from_the_others(tmp_path: Path) -> None:
    model, strategy = Module(), GradientMailStrategy(str(tmp_path), learner_id="node-7", poll_interval=0.05)
    trainer(fast_dev_run=True, strategy=strategy).fit(model, datamodule=Ranges(batch_size=2, poll_interval=0.05))
    assert model.seen == [0, 1]
    assert list(open_mailbox(tmp_path).list("queues/")) == []


class Interrupts(Callback):
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 6:  # the first batch of the third item
            trainer.save_checkpoint(trainer.default_root_dir + "/interrupted.ckpt")
            raise KeyboardInterrupt


def test_a_resumed_node_goes_on_with_what_was_not_done(tmp_path: Path) -> None:
    before, after = Module(), Module()
    with pytest.raises(SystemExit):
        trainer(max_epochs=1, default_root_dir=tmp_path, callbacks=[Interrupts()]).fit(before, datamodule=data(tmp_path / "box"))
    assert before.seen == list(range(12))
    trainer(max_epochs=1).fit(after, datamodule=data(tmp_path / "box"), ckpt_path=tmp_path / "interrupted.ckpt")
    assert sorted(after.seen) == list(range(10, 30)), "done items are not trained on again, the one that was begun is"


def test_a_module_that_belongs_to_no_trainer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"give it to trainer\.fit"):
        data(tmp_path).train_dataloader()


@pytest.mark.parametrize("method", ["items", "load"])
def test_what_a_subclass_must_say(method: str, tmp_path: Path) -> None:
    arguments = [[0, 1]] if method == "load" else []
    with pytest.raises(NotImplementedError, match="must say"):
        getattr(SharedQueueDataModule(), method)(*arguments)
