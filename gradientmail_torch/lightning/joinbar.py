"""A byte progress bar for joining a large model, in the manner of the Trainer's own."""

from __future__ import annotations

from typing import Self

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from gradientmail_torch.session import Joining

SHOWN_AFTER_S = 1.0


class JoinBar:
    """Appears when joining takes longer than a second, and is gone when it has ended."""

    def __init__(self) -> None:
        self._bar: Tqdm | None = None
        self._phase = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, joining: Joining) -> None:
        if self._bar is None or joining.phase != self._phase:
            self.close()
            self._phase = joining.phase
            self._bar = Tqdm(
                desc=f"{joining.phase.capitalize()} parameters",
                total=joining.bytes_total,
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                leave=False,
                delay=SHOWN_AFTER_S,
            )
        self._bar.update(joining.bytes_done - self._bar.n)
        if joining.bytes_done == joining.bytes_total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def join_bar(trainer: Trainer) -> JoinBar | None:
    """The bar, where the Trainer shows one. Where it shows none, the session writes to the log."""
    theirs = trainer.progress_bar_callback
    return JoinBar() if theirs is not None and getattr(theirs, "is_enabled", True) else None
