"""Train one PyTorch model on machines that share nothing but a bucket.

The names below are loaded on first use, so that importing the package costs nothing and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradientmail_torch.algorithms import DecoupledDiLoCo, DiLoCo, LocalSGD, OuterSGD
    from gradientmail_torch.lightning import GradientMailDDPStrategy, GradientMailFSDP2Strategy, GradientMailStrategy
    from gradientmail_torch.mailbox import open_mailbox
    from gradientmail_torch.session import Session, align

_HOMES = {
    "DecoupledDiLoCo": "gradientmail_torch.algorithms",
    "DiLoCo": "gradientmail_torch.algorithms",
    "GradientMailDDPStrategy": "gradientmail_torch.lightning",
    "GradientMailFSDP2Strategy": "gradientmail_torch.lightning",
    "GradientMailStrategy": "gradientmail_torch.lightning",
    "LocalSGD": "gradientmail_torch.algorithms",
    "OuterSGD": "gradientmail_torch.algorithms",
    "Session": "gradientmail_torch.session",
    "align": "gradientmail_torch.session",
    "open_mailbox": "gradientmail_torch.mailbox",
}

__all__ = [
    "DecoupledDiLoCo",
    "DiLoCo",
    "GradientMailDDPStrategy",
    "GradientMailFSDP2Strategy",
    "GradientMailStrategy",
    "LocalSGD",
    "OuterSGD",
    "Session",
    "align",
    "open_mailbox",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
