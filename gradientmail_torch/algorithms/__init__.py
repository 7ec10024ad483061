"""The mathematics and the decisions of training: tensors and values; no mailbox, no thread, no clock."""

from gradientmail_torch.algorithms.algorithm import Algorithm, DecoupledDiLoCo, DiLoCo, LocalSGD, Pace
from gradientmail_torch.algorithms.outer import OuterSGD

__all__ = ["Algorithm", "DecoupledDiLoCo", "DiLoCo", "LocalSGD", "OuterSGD", "Pace"]
