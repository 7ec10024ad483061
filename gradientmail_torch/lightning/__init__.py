"""Lightning as the host: strategies, and what takes part in a run around ``Trainer.fit``."""

from gradientmail_torch.lightning.companion import Companion
from gradientmail_torch.lightning.strategy import GradientMailDDPStrategy, GradientMailFSDP2Strategy, GradientMailStrategy

__all__ = ["Companion", "GradientMailDDPStrategy", "GradientMailFSDP2Strategy", "GradientMailStrategy"]
