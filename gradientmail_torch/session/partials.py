"""What a syncer reads of contributions that were summed ahead: untrusted, and passed over where it cannot be right.

Their contributions are then read one by one, as if nobody had summed them; see :mod:`.delegate`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from gradientmail_torch import keys
from gradientmail_torch.algorithms.merge import OUT_OF_PROPORTION, Method, Sums, directions_are_merged, is_sound, norms
from gradientmail_torch.algorithms.quorum import delegate_order, group_of
from gradientmail_torch.errors import CorruptObject
from gradientmail_torch.messages import MAX_SAMPLES, MAX_STEPS, Partial, TensorSpec, read
from gradientmail_torch.session.observer import Peer
from gradientmail_torch.session.run import Run

log = logging.getLogger(__name__)


def delegate_of(run: Run, fragment: int, version: int, members: Iterable[str], peers: Mapping[str, Peer]) -> str:
    """Who of a group's members in a round is to sum it up, as far as one knows; empty when all seem dead.

    The same for all who see the same; where two disagree, the sums of the first count.
    """
    alive = uplinks((i for i in members if i not in peers or peers[i].live), peers)
    return next(iter(delegate_order(run.manifest.nonce, fragment, version, alive)), "")


def uplinks(learners: Iterable[str], peers: Mapping[str, Peer]) -> dict[str, float]:
    """What is known of them; 0 of those that are not watched."""
    return {i: peers[i].beat.uplink if i in peers else 0.0 for i in learners}


def awaited(run: Run, fragment: int, version: int, contributors: Iterable[str], groups: int, peers: Mapping[str, Peer]) -> bool:
    """Whether a group's sum is still to come: it is not there, and who is to make it seems to be alive."""
    members: dict[int, list[str]] = {}
    for learner_id in contributors:
        members.setdefault(group_of(run.manifest.nonce, learner_id, groups), []).append(learner_id)
    there = {*run.mailbox.list(keys.partial_prefix(fragment, version))}
    return any(
        len(of_group) > 1 and keys.partial(fragment, version, group) not in there and delegate_of(run, fragment, version, of_group, peers)
        for group, of_group in members.items()
    )


def read_partials(run: Run, fragment: int, version: int, groups: int, method: Method) -> list[Partial]:
    """The records of groups that were summed ahead; those that do not hold are passed over, and their members read."""
    found = []
    for group in range(groups):
        key = keys.partial(fragment, version, group)
        partial = read_partial(run, key)
        if partial is None:
            continue
        problem = _problem(run, partial, (fragment, version, group), groups, method)
        if problem:
            log.warning("the sums %r are passed over: %s", key, problem)
        else:
            found.append(partial)
    return found


def read_partial(run: Run, key: str) -> Partial | None:
    try:
        return read(run.mailbox, Partial, key)
    except CorruptObject as error:
        log.warning("the sums are passed over: %s", error)
        return None


def _problem(run: Run, partial: Partial, where: tuple[int, int, int], groups: int, method: Method) -> str:
    if (partial.fragment, partial.version, partial.group) != where:
        return "they are those of another round or group"
    if partial.method != method:
        return f"they were made for {partial.method!r}, not {method!r}"
    if len(partial.radii) != len(run.layout[partial.fragment]):
        return f"they state {len(partial.radii)} radii for {len(run.layout[partial.fragment])} tensors"
    if partial.data.key != keys.data(partial.fragment, partial.version, partial.by, partial.nonce, "partial"):
        return f"their data {partial.data.key!r} is not in its place"
    nonces = [merged.nonce for merged in partial.merged]
    if nonces != sorted({*nonces}) or len({merged.learner_id for merged in partial.merged}) < len(nonces):
        return "they name a contribution twice, or out of order"
    for merged in partial.merged:
        if group_of(run.manifest.nonce, merged.learner_id, groups) != partial.group:
            return f"{merged.learner_id!r} is in another group"
        if not (1 <= merged.steps <= MAX_STEPS and 1 <= merged.samples <= MAX_SAMPLES):
            return f"{merged.learner_id!r} cannot have made {merged.steps} steps on {merged.samples} samples"
        if merged.weight != merged.samples * (merged.samples / merged.steps):
            return f"the weight of {merged.learner_id!r} is not that of its samples and steps"
        if any(place >= len(partial.radii) for place in merged.clips):
            return f"they shorten a tensor of {merged.learner_id!r} that is in no layout"
        if not keys.is_delta_of(merged.data.key, partial.fragment, merged.learner_id, merged.nonce):
            return f"the data of {merged.learner_id!r} is not in its place"
    return ""


def load_sums(run: Run, partial: Partial, before: Sequence[Tensor], sizes: Sequence[float]) -> Sums | None:
    """The sums that a sound record names; None, with a warning, where they are gone or cannot be right.

    ``before`` is the fragment's committed value, ``sizes`` are, by tensor, the norms that contributions are held against.
    """
    specs = run.layout[partial.fragment]
    try:
        tensors = run.tensors(partial.data, specs)
        problem = "their data is gone" if tensors is None else ""
    except CorruptObject as error:
        tensors, problem = None, str(error)
    if tensors is not None:
        sums = _as_sums(partial, tensors)
        problem = _unsound(sums, specs, partial.method, before, sizes)
        if not problem:
            return sums
    log.warning("the sums of %s for fragment %d, version %d are passed over: %s", partial.by, partial.fragment, partial.version, problem)
    return None


def _as_sums(partial: Partial, tensors: list[Tensor]) -> Sums:
    sums = Sums(unit=0.0, total=0.0, heaviest=0.0, tensors=[], radii=[])
    for merged in partial.merged:
        sums.total += sums.weigh(merged.weight, ())
        sums.heaviest = max(sums.heaviest, merged.weight)
    sums.tensors, sums.radii = tensors, [*partial.radii]
    return sums


def _unsound(sums: Sums, specs: Sequence[TensorSpec], method: str, before: Sequence[Tensor], sizes: Sequence[float]) -> str:
    each = zip(sums.tensors, norms(sums.tensors, specs), sums.radii, specs, before, sizes, strict=True)
    for tensor, norm, radius, spec, committed, size in each:
        if not is_sound(tensor, norm, spec, committed):
            return f"tensor {spec.name!r} is not finite"
        if spec.kind != "parameter":
            continue
        directional = method == "rda" and directions_are_merged(spec, "rda")
        if norm > sums.total * (1.01 if directional else OUT_OF_PROPORTION * size):
            return f"tensor {spec.name!r} is out of all proportion to its contributions"
        if radius > OUT_OF_PROPORTION * size * sums.total:
            return f"tensor {spec.name!r} would move out of all proportion to its norm"
    return ""
