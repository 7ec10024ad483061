"""The run's state beside Lightning's progress bar."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

from gradientmail_torch.callbacks.monitor import figures
from gradientmail_torch.lightning.companion import companion_of


class GradientMailProgressBar(TQDMProgressBar):
    """Lightning's progress bar with ``round``, ``peers``, ``stale`` (steps) and ``stall`` (per step)."""

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        companion = companion_of(trainer)
        stats = companion.stats if companion is not None else None
        if stats is None:
            return metrics
        shown = figures(stats)
        return metrics | {
            "round": int(shown["round"]),
            "peers": int(shown["learners"]),
            "stale": int(shown["staleness_steps"]),
            "stall": f"{shown['stall_ms_per_step']:.2f}ms",
        }
