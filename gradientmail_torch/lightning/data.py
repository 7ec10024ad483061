"""Training data that the nodes of a run share item by item, over a Shared Queue."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import ConfigError, RunTimeout, WorkFenced
from gradientmail_torch.patterns.queue import SharedQueue
from gradientmail_torch.patterns.queue_taker import Taker, Task

log = logging.getLogger(__name__)

T = TypeVar("T")
Load = Callable[[Any], Iterable[Any]]
Lead = Callable[[Callable[[], Any]], Any]

_SLICE_S = 2.0  # a waiting rank 0 lets the others hear from it so often, lest their process group times out


class SharedQueueDataset(IterableDataset[Any]):
    """The samples of the items that this node takes from a Shared Queue.

    As it is it serves a DataLoader without workers in one process. For worker processes and for several ranks on a
    node, where the claims must be made in one place, use :meth:`loader` instead of a DataLoader.

    Args:
        queue: the filled queue; or a function that gives it, called at each iteration (each epoch has its own).
        load: from an item to its samples, in an order that is the same everywhere. May be a generator.
    """

    def __init__(self, queue: SharedQueue | Callable[[], SharedQueue], load: Load) -> None:
        self.queue = queue if callable(queue) else lambda: queue
        self.load = load

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None or (dist.is_initialized() and dist.get_world_size() > 1):
            raise ConfigError(
                "a SharedQueueDataset's claims must be made in one place: use dataset.loader(batch_size=…, num_workers=…) "
                "instead of DataLoader(dataset, …) with worker processes or several ranks"
            )
        for item in self.queue():
            yield from self.load(item)

    def loader(self, batch_size: int, **options: Any) -> SharedQueueLoader:
        """Batches of the samples: see :class:`SharedQueueLoader`."""
        return SharedQueueLoader(self, batch_size, **options)


class SharedQueueLoader:
    """Batches of the items that this node takes; each item is cut into batches of its own.

    An item is done when the batch after its last one is asked for, that is, when its last one has been trained on
    (Lightning asks one batch ahead, so there when the last one is about to be). What is claimed and not done goes
    back when the iteration is left, and to the other nodes when this one dies.

    In a node of several ranks, rank 0 takes the items and every rank gets its own part of each item's samples, in
    the same number of batches; where the samples of an item do not suffice for that, single ones are used twice.

    Args:
        dataset: whose queue and ``load`` to use.
        batch_size: samples in a batch of one rank; an item's last batch may be smaller.
        num_workers: processes that load items, each a whole one at a time, so an item must fit in memory;
            0 loads in this process, sample by sample.
        prefetch_items: items per worker that are claimed and loaded ahead. Other nodes cannot take these.
        collate_fn, pin_memory, multiprocessing_context: as for a DataLoader.
        lead: how rank 0 does something for all ranks of the node.
    """

    def __init__(
        self,
        dataset: SharedQueueDataset,
        batch_size: int,
        *,
        num_workers: int = 0,
        prefetch_items: int = 1,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        lead: Lead | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0), ("prefetch_items", prefetch_items, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
        self.dataset = dataset
        self.batch_size = batch_size
        self._num_workers = num_workers
        self._prefetch_items = prefetch_items
        self._collate = collate_fn
        self._pin_memory = pin_memory
        self._context = multiprocessing_context
        self._lead = lead or lead_ranks

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        loading = _Loading(self.dataset.load, self._collate, self.batch_size, rank, size)
        with contextlib.closing(Claims(self.dataset.queue, self._lead)) as claims:
            if self._num_workers:
                # Ends when nothing is free: what dead nodes leave behind later is loaded below.
                workers = DataLoader(
                    loading,
                    sampler=_FreeItems(claims),
                    batch_size=None,
                    num_workers=self._num_workers,
                    prefetch_factor=self._prefetch_items,
                    collate_fn=_as_it_is,
                    pin_memory=self._pin_memory,
                    multiprocessing_context=self._context,
                )
                for place, batches in workers:
                    yield from batches
                    claims.done(place)
            while (taken := claims.take(None)) is not None:
                place, item = taken
                yield from loading.batches(item)
                claims.done(place)


class Claims:
    """What the node has claimed: by rank 0, for all ranks, which call the methods alike."""

    def __init__(
        self,
        queue: Callable[[], SharedQueue],
        lead: Lead,
    ) -> None:
        self._lead = lead
        self._tasks: dict[int, Task] = {}
        self._taker: Taker | None = None
        self._queue = queue
        lead(self._open)

    def take(self, timeout: float | None, *, patience: float | None = None) -> tuple[int, Any] | None:
        """The place and value of the next item, the same on every rank; None at the end, and after ``timeout`` seconds.

        Raises :class:`RunTimeout` when others have held all that is left for ``patience`` seconds.
        """
        began = SYSTEM_CLOCK.monotonic()
        while True:
            found = self._lead(lambda: self._take(_SLICE_S if timeout is None else timeout, began, patience))
            if found != "later":
                return found if found != "end" else None
            if timeout is not None:
                return None

    def done(self, place: int) -> None:
        if self._taker is not None:
            try:
                self._tasks.pop(place).done()
            except WorkFenced as error:  # it is done, by another
                log.warning("%s", error)

    def close(self) -> None:
        if self._taker is not None:
            self._taker.close()

    def _open(self) -> None:
        self._taker = self._queue().open()

    def _take(self, timeout: float, began: float, patience: float | None) -> tuple[int, Any] | str:
        assert self._taker is not None
        task = self._taker.take(timeout)
        if task is not None:
            self._tasks[task.place] = task
            return task.place, task.value
        if self._taker.finished:
            return "end"
        if patience is not None and SYSTEM_CLOCK.monotonic() - began >= patience:
            raise RunTimeout(f"other nodes have held all that is left for {patience:g} s. Call again to go on waiting")
        return "later"


class _FreeItems(Sampler[tuple[int, Any]]):
    def __init__(self, claims: Claims) -> None:
        self._claims = claims

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        while (taken := self._claims.take(0.0)) is not None:
            yield taken


class _Loading(Dataset[Any]):
    """Cuts an item into the batches of one rank; in worker processes a whole item at a time."""

    def __init__(self, load: Load, collate: Callable[[list[Any]], Any], batch_size: int, rank: int, size: int) -> None:
        self._load = load
        self._collate = collate
        self._batch_size = batch_size
        self._rank = rank
        self._size = size

    def __getitem__(self, taken: tuple[int, Any]) -> tuple[int, list[Any]]:
        place, item = taken
        return place, list(self.batches(item))

    def batches(self, item: Any) -> Iterator[Any]:
        for samples in deal(self._load(item), self._batch_size, self._rank, self._size):
            yield self._collate(samples)


def deal(samples: Iterable[T], batch_size: int, rank: int, size: int) -> Iterator[list[T]]:
    """The batches of ``rank`` out of ``size`` ranks, which get disjoint parts and equally many batches.

    A rank that would get none of an item's last samples gets one that another rank has too.
    """
    stream = iter(samples)
    while turn := list(islice(stream, batch_size * size)):
        yield turn[rank::size] or [turn[rank % len(turn)]]


def lead_ranks(work: Callable[[], T]) -> T:
    """Do ``work`` on rank 0 of the process group, if there is one, and give its result to all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except BaseException as error:
            box[1] = f"rank 0 could not take an item: {type(error).__name__}: {error}"
            dist.broadcast_object_list(box, src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise ConfigError(box[1])
    return box[0]  # type: ignore[no-any-return]


def _as_it_is(value: T) -> T:
    return value
