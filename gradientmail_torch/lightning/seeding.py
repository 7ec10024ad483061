"""Each learner's own random numbers: the run gives the initial parameters, the learner its shuffling and dropout."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

log = logging.getLogger(__name__)


def learner_seed(learner_id: str, rank: int = 0) -> int:
    """A seed of 31 bits that differs from learner to learner and follows ``seed_everything``."""
    base = os.environ.get("PL_GLOBAL_SEED", "0")
    digest = hashlib.sha256(f"{base}|{learner_id}|{rank}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def reseed(learner_id: str, rank: int) -> None:
    """Seed torch, numpy and random for this learner; the seed that the user set stays what workers derive from."""
    kept = os.environ.get("PL_GLOBAL_SEED")
    seed_everything(learner_seed(learner_id, rank), verbose=False)
    if kept is None:
        del os.environ["PL_GLOBAL_SEED"]
    else:
        os.environ["PL_GLOBAL_SEED"] = kept


def warn_if_same_data(trainer: Trainer) -> None:
    """Warn of a training loader that gives every node the same samples in the same order."""
    for loader in _leaves(trainer.train_dataloader):
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            continue
        sampler = getattr(loader.sampler, "sampler", loader.sampler)
        if isinstance(sampler, SequentialSampler) or (isinstance(sampler, DistributedSampler) and not sampler.shuffle):
            reason = "is not shuffled"
        elif getattr(sampler, "generator", None) is not None:
            reason = "is shuffled by a generator of yours"
        else:
            continue
        log.warning(
            "the training data %s, so every node may train on the same samples in the same order: "
            "use shuffle=True alone, a SharedQueue, or a part of the data for each learner",
            reason,
        )
        return


def _leaves(loaders: Any) -> Iterator[Any]:
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        for each in loaders:
            yield from _leaves(each)
    else:
        yield loaders
