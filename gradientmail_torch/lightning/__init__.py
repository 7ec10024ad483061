"""Lightning as the host: strategies, and what takes part in a run around ``Trainer.fit``."""

from gradientmail_torch.lightning.companion import Companion
from gradientmail_torch.lightning.data import SharedQueueDataset, SharedQueueLoader
from gradientmail_torch.lightning.datamodule import SharedQueueDataModule
from gradientmail_torch.lightning.evaluation import evaluate_together
from gradientmail_torch.lightning.strategy import GradientMailDDPStrategy, GradientMailFSDP2Strategy, GradientMailStrategy

__all__ = [
    "Companion",
    "GradientMailDDPStrategy",
    "GradientMailFSDP2Strategy",
    "GradientMailStrategy",
    "SharedQueueDataModule",
    "SharedQueueDataset",
    "SharedQueueLoader",
    "evaluate_together",
]
