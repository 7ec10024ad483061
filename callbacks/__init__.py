"""Lightning callbacks, each usable alone. Imported as ``gradientmail_torch.callbacks``."""

from gradientmail_torch.callbacks.alignment import AlignOnValidation
from gradientmail_torch.callbacks.barriers import DoneBarrier, EpochBarrier, StartBarrier
from gradientmail_torch.callbacks.evaluation import DistributedEvaluation
from gradientmail_torch.callbacks.monitor import RoundMonitor
from gradientmail_torch.callbacks.participation import GradientMailCallback
from gradientmail_torch.callbacks.progress import GradientMailProgressBar
from gradientmail_torch.callbacks.prometheus import PrometheusEndpoint

__all__ = [
    "AlignOnValidation",
    "DistributedEvaluation",
    "DoneBarrier",
    "EpochBarrier",
    "GradientMailCallback",
    "GradientMailProgressBar",
    "PrometheusEndpoint",
    "RoundMonitor",
    "StartBarrier",
]
