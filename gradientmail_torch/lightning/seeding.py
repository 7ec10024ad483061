"""Each learner's own random numbers: the run gives the initial parameters, the learner its shuffling and dropout."""

from __future__ import annotations

import hashlib
import logging
import os

from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

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


def warn_if_unshuffled(trainer: Trainer) -> None:
    """A training loader without shuffling gives every node the same samples in the same order."""
    loaders = trainer.train_dataloader
    for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            sampler = getattr(loader.sampler, "sampler", loader.sampler)
            if isinstance(sampler, SequentialSampler):
                log.warning(
                    "the training data is not shuffled, so every node trains on the same samples in the same order: "
                    "use shuffle=True, a SharedQueueDataset, or a part of the data for each learner"
                )
                return
