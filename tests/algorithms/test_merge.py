"""Merging: fast equals naive, the golden files, and what holds for any input."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradientmail_torch.algorithms.merge import (
    CLIP_TO_MEDIANS,
    RDA_FROM,
    DirectionVanished,
    Method,
    Weighted,
    choose,
    clip_factors,
    combined,
    merge,
    norms,
    summed,
)
from gradientmail_torch.messages import MAX_SAMPLES, MAX_STEPS, TensorSpec

quick = settings(deadline=None, max_examples=60)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "merge.json").read_text())


def spec(length: int, **changes: object) -> TensorSpec:
    return TensorSpec(**{"name": f"t{length}", "shape": (length,), "dtype": "float32", **changes})  # type: ignore[arg-type]


def merged(
    contributions: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    method: Method,
    specs: Sequence[TensorSpec] | None = None,
    clips: Sequence[dict[int, float]] | None = None,
) -> list[Tensor]:
    specs = specs or [spec(t.numel()) for t in contributions[0]]
    parts = [
        Weighted(weight=w, tensors=tensors, norms=norms(tensors, specs), clips=clip)
        for w, tensors, clip in zip(weights, contributions, clips or [{}] * len(weights), strict=True)
    ]
    return merge(lambda: iter(parts), specs, method)


def naive(vectors: Sequence[Tensor], weights: Sequence[float], method: str) -> Tensor:
    """The formulas of the paper in float64."""
    x = torch.stack(list(vectors)).double()
    w = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    mean = (w[:, None] * x).sum(0)
    if method == "mean":
        return mean
    lengths = x.norm(dim=1)
    units = torch.where(lengths[:, None] > 0, x / lengths[:, None].clamp_min(1e-300), 0.0)
    direction = (w[:, None] * units).sum(0)
    if direction.norm() <= 1e-6:
        return mean
    return (w * lengths).sum() * direction / direction.norm()


def close(found: Tensor, expected: Tensor, scale: float) -> bool:
    return bool((found.double() - expected.double()).abs().max() <= 4e-6 * scale) if found.numel() else True


# --- against other computations ----------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{len(case['weights'])}x{len(case['vectors'][0])}")
@pytest.mark.parametrize("method", ["mean", "rda"])
def test_golden_files_in_float64(case: dict[str, list], method: Method) -> None:
    vectors = [torch.tensor(v) for v in case["vectors"]]
    (found,) = merged([[v] for v in vectors], case["weights"], method)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), torch.tensor(case[method], dtype=torch.float64), rtol=2e-6, atol=2e-6)


weights_of = st.floats(1e-3, 1e6)
elements = st.floats(-1e3, 1e3, width=32)


@st.composite
def rounds(draw: st.DrawFn, least: int = 1, most: int = 6) -> tuple[list[Tensor], list[float]]:
    count, length = draw(st.integers(least, most)), draw(st.integers(2, 8))
    vectors = [torch.tensor(draw(st.lists(elements, min_size=length, max_size=length)), dtype=torch.float32) for _ in range(count)]
    return vectors, [draw(weights_of) for _ in range(count)]


def direction_is_sound(vectors: Sequence[Tensor], weights: Sequence[float]) -> bool:
    """The mean direction is no near miss, for which fp32 and float64 may differ by anything."""
    lengths = [float(v.double().norm()) for v in vectors]
    if any(0 < length < 1e-12 for length in lengths):
        return False
    units = sum(w * v.double() / length for v, w, length in zip(vectors, weights, lengths, strict=True) if length)
    return not isinstance(units, int) and float(units.norm()) / sum(weights) > 1e-2


@quick
@given(rounds())
def test_the_mean_is_that_of_float64(case: tuple[list[Tensor], list[float]]) -> None:
    vectors, weights = case
    (found,) = merged([[v] for v in vectors], weights, "mean")
    assert close(found, naive(vectors, weights, "mean"), max(float(v.abs().max()) for v in vectors) + 1e-30)


@quick
@given(rounds())
def test_rda_is_that_of_float64(case: tuple[list[Tensor], list[float]]) -> None:
    vectors, weights = case
    assume(direction_is_sound(vectors, weights))
    (found,) = merged([[v] for v in vectors], weights, "rda")
    assert close(found, naive(vectors, weights, "rda"), 1e2 * max(float(v.norm()) for v in vectors) + 1e-30)


# --- what holds --------------------------------------------------------------------------------------


@quick
@given(rounds(most=1), st.sampled_from(["auto", "mean", "rda"]))
def test_one_contribution_passes_unchanged_to_the_last_bit(case: tuple[list[Tensor], list[float]], rule: str) -> None:
    vectors, weights = case
    (found,) = merged([vectors], weights, choose(rule, 1))  # type: ignore[arg-type]
    assert torch.equal(found, vectors[0])


def test_nothing_merges_to_zero() -> None:
    for method in ("mean", "rda"):
        assert [t.tolist() for t in merge(lambda: iter(()), [spec(3)], method)] == [[0.0, 0.0, 0.0]]


def test_the_direction_of_zero_is_zero() -> None:
    """φ(0) = 0: a contribution without progress shortens the merge and does not turn it."""
    (found,) = merged([[torch.tensor([3.0, 4.0])], [torch.zeros(2)]], [1, 1], "rda")
    torch.testing.assert_close(found, torch.tensor([1.5, 2.0]))
    (found,) = merged([[torch.zeros(2)], [torch.zeros(2)]], [1, 2], "rda")
    assert found.tolist() == [0.0, 0.0]


def test_where_the_mean_direction_vanishes_the_plain_mean_is_taken() -> None:
    a = torch.tensor([1.0, 2.0, -2.0])
    (found,) = merged([[a], [-3 * a]], [1, 1], "rda")
    torch.testing.assert_close(found, -a)


def test_a_vanishing_direction_of_one_tensor_leaves_the_others_alone() -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0, 0.0])
    specs = [spec(2, name="vanishes"), spec(3, name="stays")]
    vanishing, staying = merged([[a, b], [-a, b]], [1, 1], "rda", specs)
    assert vanishing.tolist() == [0.0, 0.0]
    torch.testing.assert_close(staying, b)


def test_embeddings_single_elements_and_buffers_take_the_plain_mean() -> None:
    specs = [
        spec(2, name="embedding", embedding=True),
        spec(1, name="scalar"),
        spec(2, name="statistics", kind="buffer"),
        spec(2, name="weight"),
    ]
    ones = [torch.tensor([1.0, 0.0]), torch.tensor([1.0]), torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])]
    others = [torch.tensor([0.0, 3.0]), torch.tensor([3.0]), torch.tensor([0.0, 3.0]), torch.tensor([0.0, 3.0])]
    *plain, weight = merged([ones, others], [1, 1], "rda", specs)
    assert [t.tolist() for t in plain] == [[0.5, 1.5], [2.0], [0.5, 1.5]]
    torch.testing.assert_close(weight, torch.tensor([2.0, 2.0]) / math.sqrt(2))


def test_integer_buffers_come_from_the_heaviest_contribution_and_from_the_first_of_equals() -> None:
    specs = [spec(1, name="batches", kind="buffer", dtype="int64"), spec(1, name="flag", kind="buffer", dtype="bool")]
    contributions = [[torch.tensor([number]), torch.tensor([number == 2])] for number in (1, 2, 3, 4)]
    batches, flag = merged(contributions, [1, 5, 5, 2], "mean", specs)
    assert (batches.item(), batches.dtype, flag.item(), flag.dtype) == (2, torch.int64, True, torch.bool)


def test_auto_takes_rda_from_four_contributions_on() -> None:
    assert [choose("auto", count) for count in (1, RDA_FROM - 1, RDA_FROM)] == ["mean", "mean", "rda"]
    assert choose("rda", 2) == "rda"


@quick
@given(rounds(least=2), st.sampled_from(["mean", "rda"]))
def test_a_replay_in_the_same_order_gives_the_same_bits(case: tuple[list[Tensor], list[float]], method: Method) -> None:
    vectors, weights = case
    once = merged([[v] for v in vectors], weights, method)
    again = merged([[v.clone()] for v in vectors], list(weights), method)
    assert torch.equal(once[0], again[0])


@quick
@given(rounds(least=2), st.sampled_from(["mean", "rda"]), st.integers(-8, 8), st.integers(-8, 8))
def test_scaling_all_deltas_scales_the_merge_and_scaling_all_weights_changes_nothing(
    case: tuple[list[Tensor], list[float]], method: Method, of_deltas: int, of_weights: int
) -> None:
    vectors, weights = case
    assume(method == "mean" or direction_is_sound(vectors, weights))
    assume(all(float(v.norm()) == 0 or float(v.norm()) > 1e-6 for v in vectors))
    (found,) = merged([[v] for v in vectors], weights, method)
    (scaled,) = merged([[v * 2.0**of_deltas] for v in vectors], [w * 2.0**of_weights for w in weights], method)
    assert close(scaled * 2.0**-of_deltas, found, 1e2 * max(float(v.norm()) for v in vectors) + 1e-30)


@quick
@given(rounds(least=2), st.sampled_from(["mean", "rda"]), st.randoms(use_true_random=False))
def test_the_order_of_contributions_matters_by_rounding_alone(case: tuple[list[Tensor], list[float]], method: Method, rng: object) -> None:
    vectors, weights = case
    assume(method == "mean" or direction_is_sound(vectors, weights))
    order = list(range(len(vectors)))
    rng.shuffle(order)  # type: ignore[attr-defined]
    (found,) = merged([[v] for v in vectors], weights, method)
    (turned,) = merged([[vectors[i]] for i in order], [weights[i] for i in order], method)
    assert close(turned, found, 1e2 * max(float(v.norm()) for v in vectors) + 1e-30)


@quick
@given(rounds(least=2), rounds(least=2), st.sampled_from(["mean", "rda"]))
def test_tensors_are_merged_each_by_itself(
    a: tuple[list[Tensor], list[float]], b: tuple[list[Tensor], list[float]], method: Method
) -> None:
    count = min(len(a[0]), len(b[0]))
    pairs = [[x, y] for x, y in zip(a[0][:count], b[0][:count], strict=True)]
    specs = [spec(pairs[0][0].numel(), name="x"), spec(pairs[0][1].numel(), name="y")]
    weights = a[1][:count]
    x, y = merged(pairs, weights, method, specs)
    turned_y, turned_x = merged([pair[::-1] for pair in pairs], weights, method, specs[::-1])
    assert torch.equal(x, turned_x)
    assert torch.equal(y, turned_y)
    assert torch.equal(x, merged([[pair[0]] for pair in pairs], weights, method, specs[:1])[0])


@quick
@given(rounds(least=1))
def test_the_length_of_an_rda_merge_is_the_mean_of_the_lengths(case: tuple[list[Tensor], list[float]]) -> None:
    vectors, weights = case
    assume(direction_is_sound(vectors, weights))
    (found,) = merged([[v] for v in vectors], weights, "rda")
    expected = sum(w * float(v.norm()) for v, w in zip(vectors, weights, strict=True)) / sum(weights)
    assert float(found.norm()) == pytest.approx(expected, rel=1e-4)


def test_inputs_are_left_alone() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, -1.0])]
    before = [t.clone() for t in tensors]
    merged([[t] for t in tensors], [1, 3], "rda")
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_a_merge_streams_one_contribution_at_a_time() -> None:
    alive = 0

    def contributions():  # type: ignore[no-untyped-def]
        nonlocal alive
        for number in range(5):
            alive += 1
            assert alive == 1
            tensors = [torch.full((4,), float(number + 1))]
            yield Weighted(weight=1.0, tensors=tensors, norms=norms(tensors, [spec(4)]))
            alive -= 1

    (found,) = merge(contributions, [spec(4)], "mean")
    assert found.tolist() == [3.0] * 4


# --- clipping ----------------------------------------------------------------------------------------


def test_a_norm_per_step_above_three_medians_is_brought_down_to_them() -> None:
    factors = clip_factors([[1.0], [2.0], [60.0]], [1, 1, 1])
    assert factors == [{}, {}, {0: pytest.approx(CLIP_TO_MEDIANS * 2.0 / 60.0)}]


def test_clipping_goes_by_the_step_so_a_full_contribution_beside_called_ones_stays() -> None:
    assert clip_factors([[1.0], [1.0], [20.0]], [1, 1, 20]) == [{}, {}, {}]


def test_two_contributions_are_never_clipped() -> None:
    assert clip_factors([[1.0], [1e6]], [1, 1]) == [{}, {}]
    assert clip_factors([], []) == []


def test_a_tensor_that_only_a_minority_has_moved_keeps_its_progress() -> None:
    """An expert or a branch that two of three learners did not use: the median is zero, the progress is sound."""
    assert clip_factors([[0.0], [0.0], [1.0]], [5, 5, 5]) == [{}, {}, {}]


@quick
@given(
    st.lists(st.lists(st.just(0.0) | st.floats(1e-9, 1e6), min_size=2, max_size=2), min_size=3, max_size=9),
    st.data(),
)
def test_clipped_rates_are_at_most_three_medians_and_factors_below_one(of_all: list[list[float]], data: st.DataObject) -> None:
    steps = [data.draw(st.integers(1, 50)) for _ in of_all]
    factors = clip_factors(of_all, steps)
    for tensor in (0, 1):
        rates = [n[tensor] / s for n, s in zip(of_all, steps, strict=True)]
        middle = sorted(rates)[len(rates) // 2] if len(rates) % 2 else sum(sorted(rates)[len(rates) // 2 - 1 : len(rates) // 2 + 1]) / 2
        for rate, factor in zip(rates, factors, strict=True):
            assert 0 < factor.get(tensor, 1.0) <= 1
            assert middle == 0 or rate * factor.get(tensor, 1.0) <= CLIP_TO_MEDIANS * middle * (1 + 1e-9)
            assert (tensor in factor) == (middle > 0 and rate > CLIP_TO_MEDIANS * middle)


@pytest.mark.parametrize("method", ["mean", "rda"])
def test_a_clipped_tensor_counts_as_if_it_had_been_shorter(method: Method) -> None:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 8.0])
    (found,) = merged([[a], [b]], [1, 1], method, clips=[{}, {0: 0.25}])
    (expected,) = merged([[a], [b * 0.25]], [1, 1], method)
    torch.testing.assert_close(found, expected)


# --- out of all proportion ---------------------------------------------------------------------------------

HEAVY, LIGHT = MAX_SAMPLES * (MAX_SAMPLES / 1), 1 / MAX_STEPS
"""The weights of contributions at the bounds of what a record may say: 1e33 apart, when fp32 ends at 3e38."""
IN_ORDER = [(LIGHT, HEAVY, 1.0), (1.0, LIGHT, HEAVY), (HEAVY, 1.0, LIGHT)]


@pytest.mark.parametrize("weights", IN_ORDER, ids=str)
@pytest.mark.parametrize("method", ["mean", "rda"])
@pytest.mark.parametrize("sizes", [(), (1,), (2,), (1, 1), (3,)], ids=str)
def test_weights_at_the_bounds_leave_the_heaviest_in_full(weights: tuple[float, ...], method: Method, sizes: tuple[int, ...]) -> None:
    specs = [spec(3)]
    vectors = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1e9, -1e9, 1e9]), torch.tensor([0.0, 1e8, 0.0])]
    parts = [Weighted(weight=w, tensors=[v], norms=norms([v], specs)) for w, v in zip(weights, vectors, strict=True)]
    (found,) = in_groups(parts, sizes, specs, method) if sizes else merge(lambda: iter(parts), specs, method)
    torch.testing.assert_close(found, vectors[weights.index(HEAVY)], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("norm", [0.0, 1e-40, 1e-30])
@pytest.mark.parametrize("weight", [LIGHT, HEAVY])
def test_zeros_whose_norm_is_said_to_be_next_to_nothing_have_no_direction(norm: float, weight: float) -> None:
    vector = torch.tensor([3.0, 4.0])
    parts = [Weighted(weight=1.0, tensors=[vector], norms=[5.0]), Weighted(weight=weight, tensors=[vector * 0], norms=[norm])]
    (found,) = merge(lambda: iter(parts), [spec(2)], "rda")
    torch.testing.assert_close(found, vector / (1 + weight))


# --- sums that were made ahead -----------------------------------------------------------------------------


def in_groups(parts: Sequence[Weighted], sizes: Sequence[int], specs: Sequence[TensorSpec], method: Method) -> list[Tensor]:
    """Merged by a tree: the first parts are summed in groups of ``sizes``, the rest are added one by one."""
    each = iter(parts)
    ahead = combined([summed([next(each) for _ in range(size)], specs, method) for size in sizes], specs)
    rest = list(each)
    return merge(lambda: iter([ahead, *rest]), specs, method)


@quick
@given(rounds(least=2, most=9), st.sampled_from(["mean", "rda"]), st.data())
def test_a_merge_by_groups_is_the_flat_merge_but_for_rounding(
    case: tuple[list[Tensor], list[float]], method: Method, data: st.DataObject
) -> None:
    vectors, weights = case
    specs = [spec(vectors[0].numel())]
    units = [v.double() / max(float(v.double().norm()), 1e-300) for v in vectors]
    direction = torch.stack([w / sum(weights) * u for w, u in zip(weights, units, strict=True)]).sum(0)
    assume(method == "mean" or float(direction.norm()) > 1e-3)
    parts = [Weighted(weight=w, tensors=[v], norms=norms([v], specs), clips={}) for v, w in zip(vectors, weights, strict=True)]
    first = data.draw(st.integers(1, len(parts)))
    sizes = [first, *([data.draw(st.integers(1, len(parts) - first))] if first < len(parts) else [])]
    (found,), (flat,) = in_groups(parts, sizes, specs, method), merge(lambda: iter(parts), specs, method)
    scale = max(1.0, *(float(v.norm()) for v in vectors)) / (1.0 if method == "mean" else min(1.0, float(direction.norm())))
    assert close(found, flat, 4 * scale)


def test_integer_buffers_come_from_the_heaviest_contribution_of_all_groups() -> None:
    specs = [spec(2, kind="buffer", dtype="int64")]
    parts = [Weighted(weight=w, tensors=[torch.tensor([n, n])], norms=[0.0]) for n, w in enumerate((1.0, 5.0, 2.0, 9.0, 3.0))]
    (found,) = in_groups(parts, (2, 2), specs, "mean")
    assert found.tolist() == [3, 3]


LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("sizes", [(), (2,), (2, 3)])
@pytest.mark.parametrize("weights", [(1.0, 3.0, 7.0, 0.1, 1.0), (1.0, 1.0, 1e9, 1e-3, 3e20)])
def test_a_buffer_that_is_the_same_everywhere_stays_so_to_the_last_bit(weights: Sequence[float], sizes: Sequence[int]) -> None:
    specs = [spec(5, kind="buffer")]
    constant = torch.tensor([0.1, 1 / 3, -math.inf, LEAST, math.nan])
    parts = [Weighted(weight=w, tensors=[constant.clone()], norms=[0.0]) for w in weights]
    (found,) = in_groups(parts, sizes, specs, "rda") if sizes else merge(lambda: iter(parts), specs, "rda")
    assert torch.equal(found.view(torch.int32), constant.view(torch.int32))


def test_in_buffers_what_is_not_finite_gives_way_to_what_is() -> None:
    specs = [spec(3, kind="buffer")]
    seen = [[math.inf, 1.0, math.inf], [2.0, -math.inf, math.inf], [4.0, 3.0, math.inf]]
    (found,) = merged([[torch.tensor(each)] for each in seen], [1, 1, 1], "mean", specs)
    assert (found[0] > 2, found[0] < 4, found[1] > 1, found[1] < 3, found[2] == math.inf) == (True,) * 5


def test_where_a_direction_vanishes_sums_are_not_enough() -> None:
    specs = [spec(2)]
    parts = [Weighted(weight=1.0, tensors=[torch.tensor(v)], norms=[1.0]) for v in ([1.0, 0.0], [-1.0, 0.0])]
    with pytest.raises(DirectionVanished):
        in_groups(parts, (2,), specs, "rda")
