"""Which tensor travels in which fragment."""

from __future__ import annotations

from collections.abc import Sequence

from gradientmail_torch.errors import RunMismatch
from gradientmail_torch.messages import TensorSpec

Layout = tuple[tuple[TensorSpec, ...], ...]

AUTO_FRAGMENT_BYTES = 64 << 20
"""Size in fp32 at which a model is split when the number of fragments is left open."""
MAX_AUTO_FRAGMENTS = 24
"""The number of the paper's main configuration (arXiv 2604.21428)."""

CURE = "start the same model as the run's founder, or use a new mailbox prefix"


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
            raise RunMismatch(f"tensor {name!r} is in {'the run' if name in run else 'this model'} only: {CURE}")
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
                raise RunMismatch(f"tensor {name!r} has {what} {a} here and {b} in the run: {counts}{CURE}")
