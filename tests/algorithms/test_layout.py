"""How tensors are divided into fragments, and what makes two layouts differ."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_torch.algorithms.layout import AUTO_FRAGMENT_BYTES, MAX_AUTO_FRAGMENTS, Layout, check_same, split
from gradientmail_torch.errors import RunMismatch
from gradientmail_torch.messages import TensorSpec

quick = settings(deadline=None, max_examples=60)


def spec(name: str, *shape: int, **changes: object) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": shape, "dtype": "float32", **changes})  # type: ignore[arg-type]


def names(layout: Layout) -> list[list[str]]:
    return [[spec.name for spec in fragment] for fragment in layout]


def test_buffers_travel_with_the_last_fragment() -> None:
    specs = [spec("a", 4), spec("mean", 4, kind="buffer"), spec("b", 3), spec("count", dtype="int64", kind="buffer"), spec("c", 2)]
    assert names(split(specs, 3)) == [["a"], ["b"], ["mean", "count", "c"]]


def test_tensors_keep_the_models_order_within_a_fragment() -> None:
    assert names(split([spec("a", 1), spec("b", 5), spec("c", 2)], 1)) == [["a", "b", "c"]]


def test_there_are_no_more_fragments_than_parameters() -> None:
    assert names(split([spec("a", 1), spec("b", 2)], 9)) == [["b"], ["a"]]


def test_the_number_of_fragments_grows_with_the_model_up_to_the_papers() -> None:
    per_tensor = AUTO_FRAGMENT_BYTES // 8  # half a fragment of fp32

    def automatic(tensors: int) -> int:
        return len(split([spec(f"t{i}", per_tensor) for i in range(tensors)], None))

    assert [automatic(n) for n in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert automatic(200) == MAX_AUTO_FRAGMENTS


@quick
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=7), count=st.integers(1, 3))
def test_the_heaviest_fragment_is_at_most_four_thirds_of_the_best_possible(sizes: list[int], count: int) -> None:
    layout = split([spec(f"t{i}", size) for i, size in enumerate(sizes)], count)
    bins = len(layout)

    def heaviest(places: tuple[int, ...]) -> int:
        return max(sum(max(1, size) for size, place in zip(sizes, places, strict=True) if place == one) for one in range(bins))

    best = min(heaviest(places) for places in product(range(bins), repeat=len(sizes)))
    ours = max(sum(max(1, spec.numel) for spec in fragment) for fragment in layout)
    assert 3 * ours <= 4 * best


@quick
@given(sizes=st.lists(st.integers(0, 10**6), min_size=1, max_size=60), count=st.none() | st.integers(1, 30), buffers=st.integers(0, 3))
def test_every_tensor_is_in_exactly_one_fragment_and_all_agree(sizes: list[int], count: int | None, buffers: int) -> None:
    specs = [spec(f"t{i}", size) for i, size in enumerate(sizes)] + [spec(f"b{i}", 2, kind="buffer") for i in range(buffers)]
    layout = split(specs, count)
    assert sorted(name for fragment in names(layout) for name in fragment) == sorted(s.name for s in specs)
    assert all(layout)
    assert split(specs, count) == layout


# --- comparing layouts -------------------------------------------------------------------------------

OURS: Layout = ((spec("a", 2, 3), spec("b", 2)), (spec("c", 4), spec("n", dtype="int64", kind="buffer")))


def changed(tensor: str, /, **changes: object) -> Layout:
    def change(old: TensorSpec) -> TensorSpec:
        fields = {field: getattr(old, field) for field in ("name", "shape", "dtype", "kind", "embedding")}
        return TensorSpec(**fields | changes) if old.name == tensor else old  # type: ignore[arg-type]

    return tuple(tuple(change(spec) for spec in fragment) for fragment in OURS)


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (changed("b", name="B"), r"tensor 'B' is in the run only"),
        (OURS[:1], r"tensor 'c' is in this model only"),
        (changed("a", shape=(3, 2)), r"tensor 'a' has shape \(2, 3\) here and \(3, 2\) in the run"),
        (changed("c", kind="buffer"), r"tensor 'c' has kind parameter here and buffer in the run"),
        (changed("n", dtype="float32"), r"tensor 'n' has number type False here and True in the run"),
        ((OURS[0] + OURS[1],), r"tensor 'c' has fragment 1 here and 0 in the run: set fragments=1 as in the run \(here are 2\)"),
    ],
)
def test_the_first_difference_of_two_layouts_is_named_with_the_cure(theirs: Layout, text: str) -> None:
    with pytest.raises(RunMismatch, match=text + r".*new mailbox prefix"):
        check_same(OURS, theirs)


def test_the_first_of_several_differences_is_the_one_that_is_named() -> None:
    theirs = (tuple(spec(s.name, 9, 9) for s in OURS[0]), OURS[1])
    with pytest.raises(RunMismatch, match="'a'"):
        check_same(OURS, theirs)


def test_floating_types_may_differ() -> None:
    check_same(OURS, changed("a", dtype="bfloat16"))


@quick
@given(st.permutations(range(4)))
def test_another_order_within_a_fragment_is_a_difference(order: list[int]) -> None:
    theirs = tuple(tuple(sorted(fragment, key=lambda s: order["abcn".index(s.name)])) for fragment in OURS)
    if theirs == OURS:
        check_same(OURS, theirs)
    else:
        with pytest.raises(RunMismatch, match="place in its fragment"):
            check_same(OURS, theirs)
