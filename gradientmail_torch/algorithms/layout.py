"""Which tensors of a model travel, and in which fragment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradientmail_torch.algorithms.wire import can_travel
from gradientmail_torch.errors import ConfigError, RunMismatch
from gradientmail_torch.messages import TensorSpec

Layout = tuple[tuple[TensorSpec, ...], ...]

AUTO_FRAGMENT_BYTES = 64 << 20
"""Size in fp32 at which a model is split when the number of fragments is left open."""
MAX_AUTO_FRAGMENTS = 24
"""The number of the paper's main configuration (arXiv 2604.21428)."""

SAMPLED = 256
"""Elements, about, by which a frozen parameter is told from another."""

_CURE = "start the same model as the run's founder, or use a new mailbox prefix"


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
                raise RunMismatch(f"tensor {spec.name!r} is in the run only: {_CURE}")
        self._places = [[places[spec.name] for spec in specs] for specs in layout]
        for fragment in range(len(layout)):
            self(fragment)

    def __call__(self, fragment: int) -> list[Tensor]:
        """A fragment's tensors. What is written into them is written into the model."""
        return [_found(tensors, name, spec) for (tensors, name), spec in zip(self._places[fragment], self._layout[fragment], strict=True)]


def _found(tensors: Mapping[str, Tensor | None], name: str, spec: TensorSpec) -> Tensor:
    if name not in tensors or (held := tensors[name]) is None:
        raise RunMismatch(f"tensor {spec.name!r} is in the run only: {_CURE}")
    tensor = _as_real(held.detach())
    if tuple(tensor.shape) != spec.shape or tensor.is_floating_point() != spec.floating:
        changing = "; a buffer that changes its shape while training stays at home with persistent=False" if spec.kind == "buffer" else ""
        raise RunMismatch(
            f"tensor {spec.name!r} is {tuple(tensor.shape)} {tensor.dtype} here and {spec.shape} {spec.dtype} in the run: {_CURE}{changing}"
        )
    return tensor


def tensors_of(model: nn.Module, layout: Layout) -> list[list[Tensor]]:
    """What :class:`Held` gives now, of all fragments."""
    held = Held(model, layout)
    return [held(fragment) for fragment in range(len(layout))]


def digest_of_frozen(model: nn.Module, layout: Layout) -> str:
    """Tells a model's parameters that do not travel from others, by a sample of each in bf16, which spares reading all of them.

    Empty where there are none, or where they are sharded over processes.
    """
    in_run = {spec.name for specs in layout for spec in specs}
    frozen = {plain: each for name, each in model.named_parameters() if (plain := plain_name(name)) not in in_run}
    if not frozen or any(hasattr(each, "device_mesh") for each in frozen.values()):
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


def split(specs: Sequence[TensorSpec], count: int | None) -> Layout:
    """Divide tensors among ``count`` fragments of nearly equal size.

    The largest tensor goes first, into the lightest fragment; the heaviest fragment is at most 4/3 of the best
    possible. Buffers travel with the last fragment. None chooses the number by size.
    """
    parameters = [spec for spec in specs if spec.kind == "parameter"]
    buffers = [spec for spec in specs if spec.kind == "buffer"]
    if count is None:
        total_bytes = 4 * sum(spec.numel for spec in parameters)
        count = min(MAX_AUTO_FRAGMENTS, -(-total_bytes // AUTO_FRAGMENT_BYTES))
    count = max(1, min(count, len(parameters)))
    place = {spec.name: position for position, spec in enumerate(specs)}
    bins: list[list[TensorSpec]] = [[] for _ in range(count)]
    weights = [0] * count
    for spec in sorted(parameters, key=lambda spec: (-spec.numel, place[spec.name])):
        lightest = weights.index(min(weights))
        bins[lightest].append(spec)
        weights[lightest] += max(1, spec.numel)
    bins[-1].extend(buffers)
    return tuple(tuple(sorted(fragment, key=lambda spec: place[spec.name])) for fragment in bins)


def check_same(ours: Layout, theirs: Layout) -> None:
    """Raises :class:`RunMismatch` naming the first tensor in which two layouts differ. Floating types may."""

    def flat(layout: Layout) -> dict[str, tuple[int, int, TensorSpec]]:
        return {spec.name: (fragment, place, spec) for fragment, specs in enumerate(layout) for place, spec in enumerate(specs)}

    mine, run = flat(ours), flat(theirs)
    for name in [*run, *mine]:
        if name not in mine or name not in run:
            raise RunMismatch(f"tensor {name!r} is in {'the run' if name in run else 'this model'} only: {_CURE}")
    for name in run:  # these differ also where a tensor is missing
        (fragment, place, spec), (run_fragment, run_place, run_spec) = mine[name], run[name]
        for what, a, b in (
            ("shape", spec.shape, run_spec.shape),
            ("kind", spec.kind, run_spec.kind),
            ("number type", spec.floating, run_spec.floating),
            ("fragment", fragment, run_fragment),
            ("place in its fragment", place, run_place),
        ):
            if a != b:
                counts = "" if len(ours) == len(theirs) else f"set fragments={len(theirs)} as in the run (here are {len(ours)}), "
                raise RunMismatch(f"tensor {name!r} has {what} {a} here and {b} in the run: {counts}{_CURE}")
