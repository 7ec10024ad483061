"""A model that is spread over the processes of a node: replicated (DDP) or sharded (FSDP2).

Rank 0's session sees whole fragments in host memory. What it changes travels to the other ranks by one broadcast
for each tensor over the node's process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gradientmail_torch.algorithms.layout import Layout, describe, split, travelling
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.session.parameters import LocalParameters, ParameterAccess, Snapshot


class GroupParameters:
    """Access for rank 0; constructing it on the other ranks has them follow."""

    def __init__(self, model: nn.Module, group: Group, *, fragments: int | None, buffers: bool) -> None:
        self._group = group
        self._layout: Layout = split(describe(model, buffers=buffers), fragments)
        tensors = travelling(model, buffers=buffers)
        sharded = any(isinstance(tensor, DTensor) for tensor in tensors.values())
        self._local = _ShardedParameters(model, self._layout, buffers) if sharded else LocalParameters(model, self._layout, buffers=buffers)
        self._sharded = sharded
        self._device = next(iter(tensors.values())).device
        group.operation("snapshot", self._local.snapshot)
        for name in ("shift", "write"):
            group.operation(name, lambda fragment, name=name: getattr(self._local, name)(fragment, self._received(fragment)))
        group.operation("mix", lambda fragment, share: self._local.mix(fragment, self._received(fragment), share))

    def snapshot(self, fragment: int) -> Snapshot:
        if self._sharded:
            self._group.everyone("snapshot", fragment)
        return self._local.snapshot(fragment)

    def shift(self, fragment: int, corrections: Sequence[Tensor]) -> list[Tensor | None]:
        self._group.everyone("shift", fragment)
        return self._local.shift(fragment, self._sent(corrections))

    def write(self, fragment: int, values: Sequence[Tensor]) -> list[Tensor]:
        self._group.everyone("write", fragment)
        sent = self._sent(values)
        held = self._local.write(fragment, sent)
        return [value if h is s else h for value, s, h in zip(values, sent, held, strict=True)]

    def mix(self, fragment: int, values: Sequence[Tensor], share: float) -> None:
        self._group.everyone("mix", fragment, share)
        self._local.mix(fragment, self._sent(values), share)

    def staged(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._local.staged(tensors)

    def _sent(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        there = [tensor.to(self._device, non_blocking=True).contiguous() for tensor in tensors]
        if not self._group.alone:
            for tensor in there:
                dist.broadcast(tensor, src=0)
        return there

    def _received(self, fragment: int) -> list[Tensor]:
        tensors = []
        for spec in self._layout[fragment]:
            dtype = torch.float32 if spec.floating else getattr(torch, spec.dtype)
            tensor = torch.empty(spec.shape, dtype=dtype, device=self._device)
            dist.broadcast(tensor, src=0)
            tensors.append(tensor)
        return tensors


class _ShardedParameters:
    """Parameters that are DTensors: gathered for a snapshot, shifted and written shard by shard."""

    def __init__(self, model: nn.Module, layout: Layout, buffers: bool) -> None:
        tensors = travelling(model, buffers=buffers)
        self._layout = layout
        self._fragments = [[tensors[spec.name].detach() for spec in specs] for specs in layout]

    @torch.no_grad()
    def snapshot(self, fragment: int) -> Snapshot:
        whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in self._fragments[fragment]]
        host = [tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True) for tensor in whole]
        return lambda: host

    @torch.no_grad()
    def shift(self, fragment: int, corrections: Sequence[Tensor]) -> list[Tensor | None]:
        for tensor, spec, correction in zip(self._fragments[fragment], self._layout[fragment], corrections, strict=True):
            if spec.kind == "buffer":
                tensor.copy_(_like(correction, tensor))
            else:
                tensor.add_(_like(correction, tensor))
        return [None] * len(corrections)

    @torch.no_grad()
    def write(self, fragment: int, values: Sequence[Tensor]) -> list[Tensor]:
        for tensor, value in zip(self._fragments[fragment], values, strict=True):
            tensor.copy_(_like(value, tensor))
        return list(values)

    @torch.no_grad()
    def mix(self, fragment: int, values: Sequence[Tensor], share: float) -> None:
        for tensor, value in zip(self._fragments[fragment], values, strict=True):
            tensor.add_(_like(value, tensor) - tensor, alpha=share)

    def staged(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


def _like(whole: Tensor, tensor: Tensor) -> Tensor:
    """The part of ``whole`` that this rank holds of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return whole
    return distribute_tensor(whole.to(tensor.dtype), tensor.device_mesh, tensor.placements)


def access_for(model: nn.Module, group: Group, *, fragments: int | None, buffers: bool) -> ParameterAccess | None:
    """None where the model is whole in this process, which the session handles itself."""
    return None if group.size == 1 else GroupParameters(model, group, fragments=fragments, buffers=buffers)
