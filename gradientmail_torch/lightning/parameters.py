"""A model that is spread over the processes of a node: replicated (DDP) or sharded (FSDP2).

Rank 0's session sees whole fragments in host memory. What it changes travels to the other ranks by one broadcast
for each tensor over the node's process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gradientmail_torch.algorithms.layout import Layout
from gradientmail_torch.algorithms.model_tensors import Held, tensors_of
from gradientmail_torch.lightning.group import Group
from gradientmail_torch.session.parameters import LocalParameters, Snapshot, adopt_buffer


def reshard(model: nn.Module) -> None:
    """Have FSDP2 drop the whole parameters that it keeps after a forward pass without a backward one.

    They stand in the place of the shards, and hide what is written into those.
    """
    for module in _sharding(model):
        module.reshard()


def _sharding(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was applied to (FSDPModule, whose home differs between versions of torch)."""
    return [module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard")]


class GroupParameters:
    """Access for rank 0; constructing it on the other ranks has them follow."""

    def __init__(self, model: nn.Module, group: Group, layout: Layout) -> None:
        self._group = group
        self._layout = layout
        reshard(model)
        tensors = [tensor for fragment in tensors_of(model, layout) for tensor in fragment]
        self.sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        self._local = _ShardedParameters(model, layout) if self.sharded else LocalParameters(model, layout)
        self._device = tensors[0].device
        group.operation("snapshot", self._local.snapshot)
        for name in ("shift", "write"):
            group.operation(name, lambda fragment, name=name: getattr(self._local, name)(fragment, self._received(fragment)))
        group.operation("mix", lambda fragment, share: self._local.mix(fragment, self._received(fragment), share))

    def snapshot(self, fragment: int) -> Snapshot:
        if self.sharded:
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

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        self._sharding = _sharding(model)
        self._held = Held(model, layout)

    def _shards(self, fragment: int) -> list[Tensor]:
        for module in self._sharding:
            module.reshard()
        return self._held(fragment)

    @torch.no_grad()
    def snapshot(self, fragment: int) -> Snapshot:
        gathered = [whole(tensor) for tensor in self._shards(fragment)]
        host = [tensor.to("cpu", torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True) for tensor in gathered]
        return lambda: host

    @torch.no_grad()
    def shift(self, fragment: int, corrections: Sequence[Tensor]) -> list[Tensor | None]:
        moved: list[Tensor | None] = []
        for tensor, spec, correction in zip(self._shards(fragment), self._layout[fragment], corrections, strict=True):
            part = part_of(correction, tensor)
            if spec.kind == "buffer":
                adopt_buffer(tensor, part)
                moved.append(None)
            elif tensor.dtype.itemsize >= 4:
                tensor.add_(part)
                moved.append(None)
            else:
                before = tensor.float()
                tensor.copy_(before + part)
                moved.append(whole(tensor.float() - before).cpu())
        return moved

    @torch.no_grad()
    def write(self, fragment: int, values: Sequence[Tensor]) -> list[Tensor]:
        held = []
        for tensor, value in zip(self._shards(fragment), values, strict=True):
            tensor.copy_(part_of(value, tensor))
            exact = tensor.dtype.itemsize >= 4 or not tensor.is_floating_point()
            held.append(value if exact else value.to(tensor.dtype).float().cpu())
        return held

    @torch.no_grad()
    def mix(self, fragment: int, values: Sequence[Tensor], share: float) -> None:
        for tensor, spec, value in zip(self._shards(fragment), self._layout[fragment], values, strict=True):
            part = part_of(value, tensor)
            if spec.kind == "buffer":
                adopt_buffer(tensor, part)
            else:
                tensor.copy_(tensor + share * (part - tensor))

    def staged(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors


def part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """The part of ``whole``, in its number type, that this rank holds of ``tensor``."""
    return distribute_tensor(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else whole


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def access_for(model: nn.Module, group: Group, layout: Layout) -> GroupParameters | None:
    """None where the model is whole in this process, which the session handles itself. Called on every rank."""
    return None if group.alone else GroupParameters(model, group, layout)
