"""Evaluating one model on all nodes that are there, each its share, with the result that one process would get."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, get_args

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchmetrics import Metric

from gradientmail_torch.algorithms.model_tensors import held_by
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.lightning.data import Claims, Lead, lead_ranks
from gradientmail_torch.lightning.parameters import reshard, whole
from gradientmail_torch.lightning.participation import MailboxLike
from gradientmail_torch.lightning.scores import Kind, Scalar, Scores, added, merged, results, state_of
from gradientmail_torch.patterns.queue import SharedQueue
from gradientmail_torch.patterns.synchronization import Invocation, SynchronizationNode

_SIGNATURE = inspect.signature(LightningModule.log)

MOST_PIECES = 64


def evaluate_together(
    module: LightningModule,
    loader: DataLoader[Any],
    *,
    name: str,
    mailbox: MailboxLike,
    learner_id: str,
    pieces: int | None = None,
    timeout: float | None = None,
    lease: float = 60.0,
    poll_interval: float = 1.0,
    strategy: Strategy | None = None,
    lead: Lead | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, float]:
    """Score ``module`` on the data of ``loader``; call it on every node that has the same parameters.

    The data is cut into pieces, which the nodes take from a Shared Queue; each hands the sums of its pieces in at a
    synchronization node, where they are added up once. So every node gets the same numbers; a node that dies in the
    middle of a piece is replaced by whoever is there; one that comes late helps with what is left, or finds it done.

    A piece is scored by ``validation_step``, of which everything counts that it logs: numbers, averaged over samples
    (or by ``reduce_fx`` ``sum``, ``max``, ``min``), and torchmetrics, whose states are merged. Sums are taken in
    float64, exactly within a piece and over the pieces, so that the number of nodes changes no bit.

    Args:
        loader: names the dataset, which must have a length, and its batches. It is read in order, all of it but for ``drop_last``.
        name: serves once per run, for one set of parameters; put the epoch into it.
        mailbox, learner_id: where the nodes meet, and who this is.
        pieces: into how many the data is cut, the same on all nodes; up to 64 when left out.
        timeout: seconds to wait for the others' last pieces when nothing is left to take.
        lease, poll_interval: see :class:`~gradientmail_torch.patterns.queue.SharedQueue`.
        strategy: whose device and precision to use; the module's own device when left out.
        lead: how rank 0 does something for all ranks of the node, each of which calls this.

    Raises:
        WorkFailed: the nodes have different parameters; nobody gets a result.
        TimeoutError: others still held pieces after ``timeout`` seconds. Call again to go on.
    """
    data = Pieces(loader, pieces)
    lead = lead or lead_ranks
    scorer = _Scorer(module, data, strategy)
    names = [f"piece-{piece}" for piece in range(data.count)]
    meeting: list[SynchronizationNode] = []  # on rank 0

    def queue() -> SharedQueue:
        options: dict[str, Any] = {"lease": lease, "poll_interval": poll_interval, "clock": clock}
        meeting.append(SynchronizationNode(name, names, mailbox, learner_id, run_id="evaluation", **options))
        pieces = SharedQueue(f"evaluation {name}", mailbox, learner_id, **options)
        pieces.fill(names)
        return pieces

    def add_up(found: dict[str, Any], invocation: Invocation) -> dict[str, float]:
        return results(merged(map(Scores.from_bytes, found.values()), scorer.metrics), scorer.metrics)

    with scorer.evaluating(), contextlib.closing(Claims(queue, lead)) as claims:
        while (taken := claims.take(None, patience=timeout)) is not None:
            piece, _ = taken
            scores = merged(_gathered(scorer.score(piece)), scorer.metrics).to_bytes()
            lead(lambda piece=piece, scores=scores: meeting[0].call(names[piece], scores))  # type: ignore[misc]
            claims.done(piece)
        if not scorer.metrics:  # whoever adds up must know them
            scorer.score(0)
        return dict(lead(lambda: meeting[0].wait(add_up, timeout).value))


class Pieces:
    """The data of a loader, cut at the borders of batches."""

    def __init__(self, loader: DataLoader[Any], pieces: int | None = None) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or loader.batch_sampler is None:
            raise ConfigError("only a DataLoader with a batch_size over a dataset with a length can be cut into pieces")
        if pieces is not None and (isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1):
            raise ConfigError(f"pieces must be None or a whole number of at least 1, not {pieces!r}")
        self._loader = loader
        self._size = len(loader.dataset)  # type: ignore[arg-type]
        _check_sampler(loader.sampler, loader.dataset, self._size)
        self._batches = self._size // loader.batch_size if loader.drop_last else -(-self._size // loader.batch_size)
        self.count = min(pieces or MOST_PIECES, self._batches)
        if not self.count:
            raise ConfigError(f"the dataset is empty, or drop_last leaves none of its {self._size} samples: there is nothing to evaluate")

    def batches(self, piece: int, rank: int, size: int) -> tuple[Iterable[Any], int]:
        """The batches of a piece for one rank, as many for each rank; and how many of them are its own.

        What comes behind those is another rank's: it keeps the ranks in step, and must not be counted.
        """
        numbers = range(piece * self._batches // self.count, (piece + 1) * self._batches // self.count)
        own = numbers[rank::size]
        turns = -(-len(numbers) // size)
        padded = [*own, *[numbers[-1]] * (turns - len(own))]
        return self._load([self._places(number) for number in padded]), len(own)

    def _places(self, batch: int) -> list[int]:
        length = self._loader.batch_size or 1
        return list(range(batch * length, min((batch + 1) * length, self._size)))

    def _load(self, places: list[list[int]]) -> Iterable[Any]:
        loader = self._loader
        return DataLoader(
            loader.dataset,
            batch_sampler=places,
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )


def _check_sampler(sampler: Any, dataset: Any, size: int) -> None:
    """Refuses a sampler that gives other samples than the dataset has, each once: they are read without it."""
    if isinstance(sampler, DistributedSampler) and sampler.dataset is dataset:  # Lightning's own, within a node
        return
    if getattr(sampler, "replacement", False) or len(sampler) != size:
        raise ConfigError(
            f"the loader's {type(sampler).__name__} does not give each of the {size} samples once, and an evaluation reads the whole "
            "dataset: make the choice with torch.utils.data.Subset instead of a sampler"
        )


class _Scorer:
    """Runs ``validation_step`` and counts what it logs."""

    def __init__(self, module: LightningModule, data: Pieces, strategy: Strategy | None) -> None:
        self._module = module
        self._data = data
        self._strategy = strategy
        self._fingerprint = fingerprint(module)
        self._counted: dict[str, list[Scalar]] = {}
        self.metrics: dict[str, Metric] = {}
        """The torchmetrics that have been logged, by name."""

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, no gradients, and ``self.log`` counted here."""
        modes = {part: part.training for part in self._module.modules()}
        self._module.eval()
        self._module.log = self._log  # type: ignore[method-assign]
        try:
            with torch.no_grad():
                yield
        finally:
            del self._module.log
            for part, training in modes.items():
                part.training = training
            self._reset()

    def score(self, piece: int) -> Scores:
        """What this rank's batches of ``piece`` come to."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        batches, own = self._data.batches(piece, rank, size)
        self._reset()
        scores = None
        for number, batch in enumerate(batches):
            if number == own:
                scores = self._so_far()
            self._step(batch, number)
        return scores or self._so_far()

    def _so_far(self) -> Scores:
        scalars = {name: added(name, found) for name, found in self._counted.items()}
        return Scores(scalars, {name: state_of(metric) for name, metric in self.metrics.items()}, self._fingerprint)

    def _step(self, batch: Any, number: int) -> None:
        module, strategy = self._module, self._strategy
        self._batch = batch
        if strategy is None:
            module.validation_step(module._apply_batch_transfer_handler(batch, module.device, 0), number)
            return
        precision = strategy.precision_plugin
        with precision.val_step_context():
            module.validation_step(strategy.batch_to_device(precision.convert_input(batch), dataloader_idx=0), number)

    def _log(self, name: str, value: Any, *arguments: Any, **options: Any) -> None:
        """In the place of ``LightningModule.log``."""
        given = _SIGNATURE.bind(self._module, name, value, *arguments, **options).arguments
        if isinstance(value, Metric):
            self.metrics[name] = value
            return
        kind = getattr(given.get("reduce_fx", "mean"), "__name__", given.get("reduce_fx", "mean"))
        if kind not in get_args(Kind):
            raise ConfigError(f"{name!r} is logged with reduce_fx {kind!r}: only {', '.join(get_args(Kind))} can be added up over nodes")
        number = float(value)
        weight = float(given.get("batch_size") or extract_batch_size(self._batch)) if kind == "mean" else 1.0
        self._counted.setdefault(name, []).append(Scalar(kind, number * weight, weight))

    def _reset(self) -> None:
        self._counted.clear()
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.reset()


def fingerprint(module: nn.Module) -> str:
    """A digest of all parameters and buffers. Where they are sharded over ranks, it is called on all of them."""
    reshard(module)
    digest = hashlib.sha256()
    for name, tensor in sorted(held_by(module).items()):
        digest.update(name.encode())
        digest.update(whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _gathered(scores: Scores) -> list[Scores]:
    """The scores of every rank of the node, in order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [scores]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, scores.to_bytes())
    return [Scores.from_bytes(each) for each in found]
