"""Distributed evaluation: every node gets the numbers that one process would get."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SubsetRandomSampler, TensorDataset, WeightedRandomSampler
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy
from gradientmail_torch.callbacks import DistributedEvaluation
from gradientmail_torch.errors import ConfigError, CorruptObject, WorkFailed
from gradientmail_torch.lightning.evaluation import Pieces, evaluate_together
from gradientmail_torch.lightning.scores import Scalar, Scores, added
from gradientmail_torch.mailbox import open_mailbox
from gradientmail_torch.patterns.queue import SharedQueue

QUICK: dict[str, Any] = {"lease": 2.0, "poll_interval": 0.05}


def labelled(size: int = 203) -> TensorDataset:
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(size, 4, generator=random), torch.randint(0, 3, (size,), generator=random))


class Classifier(LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        random = torch.Generator().manual_seed(seed)  # nodes are threads here, and would share the global one
        for parameter in self.layer.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=random)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.more = MetricCollection({"confusion": MulticlassConfusionMatrix(3), "macro": MulticlassAccuracy(3)})
        self.auroc = BinaryAUROC()  # keeps all predictions

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        logits = self.layer(inputs)
        self.log("loss", nn.functional.cross_entropy(logits, labels), prog_bar=True, batch_size=len(inputs))
        self.log_dict({"samples": float(len(inputs)), "zeros": (labels == 0).sum()}, reduce_fx="sum")
        self.log("largest", logits.max(), reduce_fx="max")
        self.accuracy(logits, labels)
        self.more.update(logits, labels)
        self.auroc.update(logits[:, 0], (labels == 0).long())
        self.log("accuracy", self.accuracy)
        self.log_dict(self.more)
        self.log("auroc", self.auroc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def evaluate(box: Path | str, learner_id: str = "node-0", module: LightningModule | None = None, **options: Any) -> dict[str, float]:
    loader = options.pop("loader", None) or DataLoader(labelled(), options.pop("batch_size", 8), collate_fn=None)
    return evaluate_together(
        module or Classifier(), loader, **{"name": "final", "mailbox": str(box), "learner_id": learner_id, **QUICK, **options}
    )


def at_once(*runs: Callable[[], Any]) -> list[Any]:
    """What each gives, or raises, on a thread of its own."""
    results: list[Any] = [None] * len(runs)

    def run(place: int) -> None:
        try:
            results[place] = runs[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# --- the numbers ---------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_whole_data(tmp_path: Path) -> None:
    module = Classifier()
    found = evaluate(tmp_path, module=module)
    inputs, labels = labelled().tensors
    logits = module.layer(inputs).detach()
    assert found["loss"] == pytest.approx(float(nn.functional.cross_entropy(logits.double(), labels)), rel=1e-7)
    assert (found["samples"], found["zeros"]) == (203, int((labels == 0).sum()))
    assert found["largest"] == float(logits.max())
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()), rel=1e-7)
    assert found["auroc"] == pytest.approx(float(BinaryAUROC()(logits[:, 0], (labels == 0).long())), rel=1e-7)
    confusion = MulticlassConfusionMatrix(3)(logits, labels).flatten().tolist()
    assert [found[f"confusion_{place}"] for place in range(9)] == confusion


def test_many_nodes_get_the_same_numbers_as_one_to_the_last_bit(mailbox_url: str, tmp_path: Path) -> None:
    alone = evaluate(tmp_path / "alone")
    together = at_once(*(lambda name=f"node-{number}": evaluate(mailbox_url, name) for number in range(4)))
    assert together == [alone] * 4


def test_a_node_that_comes_late_gets_them_at_once_and_the_module_is_left_as_it_was(tmp_path: Path) -> None:
    first = evaluate(tmp_path)
    module = Classifier()
    module.layer.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert evaluate(tmp_path, "late", module) == first
    assert module.training
    assert module.layer.training
    assert "log" not in vars(module)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert module.accuracy.update_count == 0


class Dies(Classifier):
    """Its process ends in the middle of the second piece."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.batches = getattr(self, "batches", 0) + 1
        if self.batches == 5:
            raise KeyboardInterrupt
        super().validation_step(batch, batch_idx)


def test_the_piece_of_a_node_that_ends_in_the_middle_goes_to_the_others(mailbox_url: str, tmp_path: Path) -> None:
    alone = evaluate(tmp_path / "alone", pieces=8)
    with pytest.raises(KeyboardInterrupt):
        evaluate(mailbox_url, "mortal", Dies(), pieces=8)
    assert evaluate(mailbox_url, "heir", pieces=8) == alone
    owners = [outcome.owner.rpartition("-")[0] for outcome in SharedQueue("evaluation final", mailbox_url, "reader").outcomes()]
    assert owners == ["mortal"] + ["heir"] * 7


# --- what is refused -----------------------------------------------------------------------------------


def test_nodes_with_different_parameters_get_no_result(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(tmp_path, "mortal", Dies(seed=0), pieces=8)
    with pytest.raises(WorkFailed, match="2 different sets of parameters"):
        evaluate(tmp_path, "heir", Classifier(seed=1), pieces=8)


def test_a_different_cut_under_the_same_name_is_refused(tmp_path: Path) -> None:
    evaluate(tmp_path, pieces=8)
    with pytest.raises(Exception, match="begun with other nodes"):
        evaluate(tmp_path, pieces=7)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "pieces", "message"),
    [
        (DataLoader(Numbers(), 2), None, "dataset with a length"),
        (DataLoader(labelled(), None), None, "with a batch_size"),
        (DataLoader(labelled()), 0, "pieces must be"),
        (DataLoader(labelled()), 1.5, "pieces must be"),
        (DataLoader(TensorDataset(torch.zeros(0, 1)), 2, sampler=[]), None, "empty"),
    ],
)
def test_data_that_cannot_be_cut_is_refused(loader: Any, pieces: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pieces(loader, pieces)


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(100)),
        RandomSampler(labelled(), replacement=True),
        RandomSampler(labelled(), num_samples=10),
        WeightedRandomSampler([1.0] * 203, 203),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_that_gives_other_samples_than_the_dataset_is_refused(sampler: Any) -> None:
    with pytest.raises(ConfigError, match=f"{type(sampler).__name__} does not give each of the 203 samples once.*Subset"):
        Pieces(DataLoader(labelled(), 8, sampler=sampler))


@pytest.mark.parametrize("batch_size", [8, 29])
def test_what_a_loader_drops_is_not_scored(batch_size: int, tmp_path: Path) -> None:
    found = evaluate(tmp_path, loader=DataLoader(labelled(), batch_size, shuffle=True, drop_last=True), pieces=3)
    assert found["samples"] == 203 // batch_size * batch_size
    with pytest.raises(ConfigError, match="drop_last leaves none of its 203 samples"):
        Pieces(DataLoader(labelled(), 204, drop_last=True))


class Custom(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx=lambda stacked: stacked.prod())

    def update(self, value: Tensor) -> None:
        self.value = value

    def compute(self) -> Tensor:
        return self.value


class Logs(Classifier):
    """Logs one thing."""

    def __init__(self, name: str, value: Any, **options: Any) -> None:
        super().__init__()
        self.custom = value if isinstance(value, Metric) else None
        self._logged = (name, value, options)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        name, value, options = self._logged
        if isinstance(value, Metric):
            value.update(batch[0].mean())
        self.log(name, value, **options)


def test_a_metric_whose_states_cannot_be_merged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"state 'value' of metric 'odd' \(Custom\) cannot be merged"):
        evaluate(tmp_path, module=Logs("odd", Custom()))


def test_a_reduction_that_cannot_be_merged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'odd' is logged with reduce_fx 'median'"):
        evaluate(tmp_path, module=Logs("odd", 1.0, reduce_fx=torch.median))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_not_finite_arrive(value: float, tmp_path: Path) -> None:
    found = evaluate(tmp_path, module=Logs("odd", value, batch_size=8))["odd"]
    assert str(found) == str(value)


@pytest.mark.parametrize("kind", ["mean", "sum", "max", "min"])
@pytest.mark.parametrize("odd", [[math.nan], [math.inf, -math.inf]])
def test_numbers_that_are_not_finite_come_out_alike_in_any_order(odd: list[float], kind: Any) -> None:
    found = {str(added("odd", [Scalar(kind, value) for value in order]).total) for order in itertools.permutations([1.0, 2.0, *odd])}
    assert len(found) == 1
    assert math.nan not in odd or found == {"nan"}


@pytest.mark.parametrize("data", [b"", b"\0" * 20, b"\xff" * 40, (2).to_bytes(8, "little") + b"{}"])
def test_rubbish_is_no_scores(data: bytes) -> None:
    with pytest.raises(CorruptObject):
        Scores.from_bytes(data)


# --- in a Trainer --------------------------------------------------------------------------------------


def quiet(**options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        limit_val_batches=0, **{"enable_checkpointing": False, **options},
    )  # fmt: skip


def node(box: Path, learner_id: str, callback: DistributedEvaluation, *, parties: int, epochs: int = 2, **options: Any) -> dict[str, Any]:
    strategy = GradientMailStrategy(
        str(box), algorithm=DecoupledDiLoCo(sync_every=5, fragments=1), learner_id=learner_id, start_parties=parties, done_parties=parties,
        poll_interval=0.05, lease=3.0, reseed=False,
    )  # fmt: skip
    trainer = quiet(strategy=strategy, max_epochs=epochs, **{"callbacks": [callback], **options})
    module = Classifier()
    loader = DataLoader(labelled(), 8)
    module.val_dataloader = lambda: loader  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(labelled(), 16, shuffle=True))
    return dict(trainer.callback_metrics)


def test_the_end_of_training_scores_the_runs_parameters_on_all_nodes(tmp_path: Path) -> None:
    callbacks = [DistributedEvaluation(poll_interval=0.05) for _ in range(2)]
    found = at_once(*(lambda number=number: node(tmp_path, f"node-{number}", callbacks[number], parties=2) for number in range(2)))
    assert callbacks[0].metrics == callbacks[1].metrics != {}
    assert callbacks[0].metrics["samples"] == 203
    assert found[0] == found[1]
    assert float(found[0]["run_loss"]) == callbacks[0].metrics["loss"]


def test_the_end_of_an_epoch_scores_one_set_of_committed_parameters(tmp_path: Path) -> None:
    callback = DistributedEvaluation(every_n_epochs=1, poll_interval=0.05)
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", monitor="run_loss", save_top_k=-1, save_on_train_epoch_end=True)
    found = node(tmp_path / "box", "node-0", callback, parties=1, callbacks=[callback, checkpoints], enable_checkpointing=True)
    assert float(found["run_samples"]) == 203
    assert len(checkpoints.best_k_models) == 2
    box = open_mailbox(tmp_path / "box")
    assert len(list(box.list("sync/parameters/node/"))) >= 2 * 4, "published once for each epoch"


class FreezesAndThaws(Callback):
    """The bias is trained from the second epoch on, and the weight no longer."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.layer.bias.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.layer.bias.requires_grad_(True)
            pl_module.layer.weight.requires_grad_(False)


def test_what_is_frozen_and_thawed_in_the_middle_changes_nothing_that_is_scored(tmp_path: Path) -> None:
    callback = DistributedEvaluation(every_n_epochs=1, poll_interval=0.05)
    found = node(tmp_path, "node-0", callback, parties=1, epochs=3, callbacks=[FreezesAndThaws(), callback])
    assert float(found["run_samples"]) == 203


def test_every_n_epochs_must_be_a_number(tmp_path: Path) -> None:
    for value in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="every_n_epochs"):
            DistributedEvaluation(every_n_epochs=value)  # type: ignore[arg-type]


def test_two_loaders_are_refused(tmp_path: Path) -> None:
    module = Classifier()
    module.val_dataloader = lambda: [DataLoader(labelled()), DataLoader(labelled())]  # type: ignore[method-assign]
    trainer = quiet(max_epochs=1, callbacks=[DistributedEvaluation(str(tmp_path), "node-0")])
    with pytest.raises(ConfigError, match="one DataLoader"), contextlib.suppress(SystemExit):
        trainer.fit(module, DataLoader(labelled(), 16))
