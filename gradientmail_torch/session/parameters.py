"""Access to a model's tensors, fragment by fragment, on the training thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from gradientmail_torch.algorithms.layout import Layout
from gradientmail_torch.algorithms.merge import blend
from gradientmail_torch.algorithms.model_tensors import Held
from gradientmail_torch.messages import TensorSpec

Snapshot = Callable[[], list[Tensor]]
"""Waits until a copy has landed in host memory and gives it, in fp32. For background threads."""


class ParameterAccess(Protocol):
    """What the session does to the model. Called on the training thread, between two steps."""

    def snapshot(self, fragment: int) -> Snapshot:
        """Begin to copy a fragment to host memory, without waiting for the device."""
        ...

    def shift(self, fragment: int, corrections: Sequence[Tensor]) -> list[Tensor | None]:
        """Add a correction to each parameter; buffers, of which a value is given, as in :func:`adopt_buffer`.

        Returns what each parameter really moved by, None where that is the correction itself: a bf16
        parameter moves by less or more than it was asked to.
        """
        ...

    def write(self, fragment: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Set a fragment; returns, in fp32, what the device holds afterwards."""
        ...

    def mix(self, fragment: int, values: Sequence[Tensor], share: float) -> None:
        """Move each parameter by ``share`` of its way to ``values``; buffers as in :func:`adopt_buffer`."""
        ...

    def staged(self, tensors: list[Tensor]) -> list[Tensor]:
        """Called in the background: the tensors where the training thread can use them fastest."""
        ...


class LocalParameters:
    """The parameters of a model that lives in this process alone."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._held = Held(model, layout)
        self._on_cuda = any(tensor.is_cuda for fragment in range(len(layout)) for tensor in self._held(fragment))

    def snapshot(self, fragment: int) -> Snapshot:
        tensors = self._held(fragment)
        if self._on_cuda:
            return _device_snapshot(tensors)
        host = [_as_wired(tensor, copy=True) for tensor in tensors]
        return lambda: host

    @torch.no_grad()
    def shift(self, fragment: int, corrections: Sequence[Tensor]) -> list[Tensor | None]:
        moved: list[Tensor | None] = []
        for tensor, spec, correction in zip(self._held(fragment), self._layout[fragment], corrections, strict=True):
            there = correction.to(tensor.device, non_blocking=True)
            if spec.kind == "buffer":
                adopt_buffer(tensor, there)
                moved.append(None)
            elif tensor.dtype.itemsize >= 4:
                tensor.add_(there)
                moved.append(None)
            else:
                before = tensor.float()
                tensor.copy_(before + there)
                moved.append((tensor.float() - before).cpu())
        return moved

    @torch.no_grad()
    def write(self, fragment: int, values: Sequence[Tensor]) -> list[Tensor]:
        tensors = self._held(fragment)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value, non_blocking=True)
        return [
            value if tensor.dtype.itemsize >= 4 or not tensor.is_floating_point() else tensor.float().cpu()
            for tensor, value in zip(tensors, values, strict=True)
        ]

    @torch.no_grad()
    def mix(self, fragment: int, values: Sequence[Tensor], share: float) -> None:
        for tensor, spec, value in zip(self._held(fragment), self._layout[fragment], values, strict=True):
            there = value.to(tensor.device, tensor.dtype)
            if spec.kind == "buffer":
                adopt_buffer(tensor, there)
            else:
                tensor.lerp_(there, share)

    def staged(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.pin_memory() for tensor in tensors] if self._on_cuda else tensors


BUFFER_SHARE = 0.5


def adopt_buffer(tensor: Tensor, value: Tensor) -> None:
    """What a buffer of a learner that has trained on makes of a commit's value: half of the way to it.

    To take it whole would undo what the steps since the snapshot have done to a running statistic: where commits are a
    cycle late, all of it, for ever. What counts in whole numbers stays the learner's own.
    """
    if tensor.is_floating_point():
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        tensor.copy_(blend(tensor.to(wide), value.to(wide), BUFFER_SHARE))


def _as_wired(tensor: Tensor, *, copy: bool = False) -> Tensor:
    return tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=copy)


def _device_snapshot(tensors: Sequence[Tensor]) -> Snapshot:
    """Clone on the training stream, so that the next step may go on, and copy to pinned memory on another."""
    device = next(tensor.device for tensor in tensors if tensor.is_cuda)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    clones = [tensor.clone() for tensor in tensors]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        host = [torch.empty(clone.shape, dtype=clone.dtype, pin_memory=True).copy_(clone, non_blocking=True) for clone in clones]
        for clone in clones:
            if clone.is_cuda:
                clone.record_stream(stream)  # the allocator must not reuse it before the copy has ended
        landed = stream.record_event()

    def wait() -> list[Tensor]:
        landed.synchronize()
        return [_as_wired(tensor) for tensor in host]

    return wait


def initial_values(access: ParameterAccess, fragment: int) -> list[Tensor]:
    """A fragment as the model holds it now, in host memory."""
    return access.snapshot(fragment)()


def difference(values: Sequence[Tensor], base: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """``values`` − ``base`` for parameters; buffers stay values."""
    return [v - b if spec.kind == "parameter" else v for v, b, spec in zip(values, base, specs, strict=True)]


def total(values: Sequence[Tensor], delta: Sequence[Tensor], specs: Sequence[TensorSpec]) -> list[Tensor]:
    """``values`` + ``delta`` for parameters; buffers take the delta, which is a value."""
    return [v + d if spec.kind == "parameter" else d for v, d, spec in zip(values, delta, specs, strict=True)]
