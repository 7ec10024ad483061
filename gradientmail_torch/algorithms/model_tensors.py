"""The tensors of a model that travel: their names, what they are, and how to reach them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradientmail_torch.algorithms.layout import CURE, Layout
from gradientmail_torch.algorithms.wire import can_travel
from gradientmail_torch.errors import ConfigError, RunMismatch
from gradientmail_torch.messages import TensorSpec

SAMPLED = 256
"""Elements, about, by which a frozen parameter is told from another."""


def plain_name(name: str) -> str:
    """A tensor's name where no module went through ``torch.compile``, which wraps it: not all nodes need to compile."""
    return name.replace("_orig_mod.", "")


def held_by(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters (tied ones once) and buffers by their plain names. Complex ones are seen as pairs of real numbers."""
    return {plain_name(name): _as_real(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def travelling(model: nn.Module, *, buffers: bool = True) -> dict[str, Tensor]:
    """The tensors that travel by plain name: trainable parameters (tied ones once), then persistent buffers.

    Raises :class:`ConfigError` for a model without trainable parameters, and for a tensor that cannot travel.
    """
    tensors: dict[str, Tensor] = {plain_name(name): each for name, each in model.named_parameters() if each.requires_grad}
    if not tensors:
        raise ConfigError("the model has no trainable parameters: there is nothing to train together (is everything frozen?)")
    if buffers:
        passing = _passing(model)
        tensors |= {plain: each for name, each in model.named_buffers() if (plain := plain_name(name)) not in passing}
    for name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta:
            raise ConfigError(
                f"tensor {name!r} has no values yet (a lazy module, or the meta device): give it some before training, "
                "by running a batch through the model in setup(), say"
            )
        if problem := _problem(tensor):
            raise ConfigError(
                f"tensor {name!r} {problem}, and so cannot travel: register the buffer with persistent=False, "
                "make an ordinary tensor of it, or leave all buffers at home by buffers=False of the algorithm"
            )
    return tensors


def _passing(model: nn.Module) -> set[str]:
    """Buffers with persistent=False. A state_dict does not tell them: many a module leaves out of it what it could load from elsewhere."""
    return {
        plain_name(f"{prefix}.{name}".lstrip("."))
        for prefix, module in model.named_modules()
        for name in getattr(module, "_non_persistent_buffers_set", ())  # a scripted module has none
    }


def _problem(tensor: Tensor) -> str:
    """Why a tensor cannot travel; empty when it can."""
    if tensor.layout != torch.strided:
        return f"is {tensor.layout}"
    if not (tensor.is_complex() or can_travel(tensor.dtype)):
        return f"is of type {tensor.dtype}"
    if any(stride == 0 and extent > 1 for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)):
        return "is an expanded view, which cannot be written"
    return ""


class Held:
    """The tensors of a layout, as a model holds them at the moment, whether they are trainable then or not.

    They are looked up each time: a module may assign a buffer anew in each step, and a parameter may be given other data.

    Raises :class:`RunMismatch`, also when called, naming the first tensor that the model lacks or holds in another shape.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._layout = layout
        places = {
            plain_name(f"{prefix}.{name}".lstrip(".")): (tensors, name)
            for prefix, module in model.named_modules()
            for tensors in (module._parameters, module._buffers)
            for name in [*tensors.keys()]  # those of a scripted module are no dict
        }
        for spec in (spec for specs in layout for spec in specs):
            if spec.name not in places:
                raise RunMismatch(f"tensor {spec.name!r} is in the run only: {CURE}")
        self._places = [[places[spec.name] for spec in specs] for specs in layout]
        for fragment in range(len(layout)):
            self(fragment)

    def __call__(self, fragment: int) -> list[Tensor]:
        """A fragment's tensors. What is written into them is written into the model."""
        return [_found(tensors, name, spec) for (tensors, name), spec in zip(self._places[fragment], self._layout[fragment], strict=True)]


def _found(tensors: Mapping[str, Tensor | None], name: str, spec: TensorSpec) -> Tensor:
    if name not in tensors or (held := tensors[name]) is None:
        raise RunMismatch(f"tensor {spec.name!r} is in the run only: {CURE}")
    tensor = _as_real(held.detach())
    if tuple(tensor.shape) != spec.shape or tensor.is_floating_point() != spec.floating:
        changing = "; a buffer that changes its shape while training stays at home with persistent=False" if spec.kind == "buffer" else ""
        raise RunMismatch(
            f"tensor {spec.name!r} is {tuple(tensor.shape)} {tensor.dtype} here and {spec.shape} {spec.dtype} in the run: {CURE}{changing}"
        )
    return tensor


def tensors_of(model: nn.Module, layout: Layout) -> list[list[Tensor]]:
    """What :class:`Held` gives now, of all fragments."""
    held = Held(model, layout)
    return [held(fragment) for fragment in range(len(layout))]


def digest_of_frozen(model: nn.Module, layout: Layout) -> str:
    """Tells a model's parameters that do not travel from others, by a sample of each in bf16, which spares reading all of them.

    Empty where there are none, or where they are not here: sharded over processes, or offloaded.
    """
    in_run = {spec.name for specs in layout for spec in specs}
    frozen = {plain: each for name, each in model.named_parameters() if (plain := plain_name(name)) not in in_run}
    if not frozen or any(hasattr(each, "device_mesh") or each.is_meta for each in frozen.values()):
        return ""
    digest = hashlib.sha256()
    for name, parameter in sorted(frozen.items()):
        flat = _as_real(parameter.detach()).flatten()
        sample = flat[:: max(1, flat.numel() // SAMPLED)].to("cpu", torch.bfloat16).contiguous()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe(model: nn.Module, *, buffers: bool = True) -> list[TensorSpec]:
    """What :func:`travelling` finds, as all learners agree on it."""
    tensors = travelling(model, buffers=buffers)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    return [
        TensorSpec(
            name=name,
            shape=tuple(_as_real(tensor).shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
            embedding=id(tensor) in embeddings,
        )
        for name, tensor in tensors.items()
    ]
