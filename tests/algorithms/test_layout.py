"""Which tensors travel, and how they are divided into fragments."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradientmail_torch.algorithms.layout import (
    AUTO_FRAGMENT_BYTES,
    MAX_AUTO_FRAGMENTS,
    Layout,
    check_same,
    describe,
    digest_of_frozen,
    held_by,
    split,
    tensors_of,
    travelling,
)
from gradientmail_torch.errors import ConfigError, RunMismatch
from gradientmail_torch.messages import TensorSpec

quick = settings(deadline=None, max_examples=60)


def spec(name: str, *shape: int, **changes: object) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": shape, "dtype": "float32", **changes})  # type: ignore[arg-type]


def names(layout: Layout) -> list[list[str]]:
    return [[spec.name for spec in fragment] for fragment in layout]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.hidden = nn.Linear(4, 4)
        self.output = nn.Linear(4, 10, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)


# --- what travels ------------------------------------------------------------------------------------


def test_tied_parameters_travel_once_and_count_as_embeddings() -> None:
    specs = {spec.name: spec for spec in describe(Tied())}
    assert "output.weight" not in specs
    assert specs["embedding.weight"].embedding
    assert not specs["hidden.weight"].embedding


def test_a_head_that_is_named_before_the_embedding_it_is_tied_to_is_one() -> None:
    model = nn.ModuleDict({"a_head": nn.Linear(4, 10, bias=False), "b_embedding": nn.Embedding(10, 4)})
    model["a_head"].weight = model["b_embedding"].weight
    (only,) = describe(model)
    assert (only.name, only.embedding) == ("a_head.weight", True)


def test_frozen_parameters_never_travel() -> None:
    model = Tied()
    model.hidden.requires_grad_(False)
    assert not [name for name in travelling(model) if name.startswith("hidden")]


def test_the_tensors_of_a_layout_are_found_also_when_they_are_frozen_for_a_while() -> None:
    model = Tied()
    layout = split(describe(model), 2)
    model.requires_grad_(False)
    assert [[tensor.shape for tensor in fragment] for fragment in tensors_of(model, layout)] == [
        [spec.shape for spec in fragment] for fragment in layout
    ]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (((spec("elsewhere", 4),),), "'elsewhere' is in the run only"),
        (((spec("hidden.bias", 5),),), r"'hidden.bias' is \(4,\) torch.float32 here and \(5,\) float32 in the run"),
        (((spec("hidden.bias", 4, dtype="int64"),),), "'hidden.bias' is .* and .* int64 in the run"),
    ],
)
def test_a_layout_of_another_model_names_the_first_difference(layout: Layout, text: str) -> None:
    with pytest.raises(RunMismatch, match=text):
        tensors_of(Tied(), layout)


def test_persistent_buffers_travel_with_their_types_unless_turned_off() -> None:
    buffers = {spec.name: spec.dtype for spec in describe(Tied()) if spec.kind == "buffer"}
    assert buffers == {"norm.running_mean": "float32", "norm.running_var": "float32", "norm.num_batches_tracked": "int64"}
    assert not [spec for spec in describe(Tied(), buffers=False) if spec.kind == "buffer"]


class OfItsOwn(Tied):
    """Of which a checkpoint holds the output alone, under another name."""

    def state_dict(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        return {"model.output": super().state_dict(*arguments, **options)["output.weight"]}


def test_what_travels_does_not_depend_on_what_a_state_dict_leaves_out() -> None:
    assert describe(OfItsOwn()) == describe(Tied())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False), nn.BatchNorm1d(3, affine=False)):
        with pytest.raises(ConfigError, match="no trainable parameters"):
            describe(model)


def test_names_are_the_same_whether_parts_of_a_model_are_compiled_or_not() -> None:
    plain = Tied()
    layout = split(describe(plain), 2)
    parts = Tied()
    parts.hidden = torch.compile(parts.hidden)
    for model in (torch.compile(Tied()), torch.compile(parts), parts):
        assert split(describe(model), 2) == layout
        assert [tensor.shape for tensor in tensors_of(model, layout)[0]] == [tensor.shape for tensor in tensors_of(plain, layout)[0]]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_parts_travel_as_others_do() -> None:
    plain, parts = Tied(), Tied()
    parts.hidden = torch.jit.script(nn.Linear(4, 4))
    layout = split(describe(plain), 1)
    assert split(describe(parts), 1) == layout
    with torch.no_grad():
        for tensor in tensors_of(parts, layout)[0]:
            tensor.fill_(1)
    assert parts.hidden.weight.sum() == 16


def test_complex_tensors_travel_as_pairs_of_real_numbers() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
    model.register_buffer("angles", torch.ones(3, dtype=torch.complex128))
    specs = describe(model)
    assert [(spec.name, spec.shape, spec.dtype, spec.kind, spec.floating) for spec in specs] == [
        ("w", (2, 2), "complex64", "parameter", True),
        ("angles", (3, 2), "complex128", "buffer", True),
    ]
    held_by(model)["w"].add_(1)
    assert model.w.tolist() == [2 + 3j, 4 - 3j], "what is written there is written into the model"


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(2, dtype=torch.uint16), "'given' is of type torch.uint16, and so cannot travel: .* persistent=False"),
        (torch.eye(2).to_sparse(), "'given' is torch.sparse_coo"),
        (torch.ones(1).expand(3), "'given' is an expanded view"),
        (torch.zeros(2, device="meta"), "'given' has no values yet"),
        (nn.parameter.UninitializedBuffer(), "'given' has no values yet"),
    ],
    ids=["type", "sparse", "expanded", "meta", "lazy"],
)
def test_a_tensor_that_cannot_travel_is_named_with_the_cure(tensor: torch.Tensor, text: str) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("given", tensor)
    with pytest.raises(ConfigError, match=text):
        describe(model)
    assert describe(model, buffers=False)


def test_frozen_parameters_are_told_from_others_whatever_their_type_and_whoever_compiles() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.ModuleDict({"base": nn.Linear(40, 40).requires_grad_(False), "head": nn.Linear(4, 1)})

    layout = split(describe(model(0)), 1)
    mine = digest_of_frozen(model(0), layout)
    assert digest_of_frozen(model(0).bfloat16(), layout) == mine
    assert digest_of_frozen(torch.compile(model(0)), layout) == mine
    assert digest_of_frozen(model(1), layout) != mine
    assert digest_of_frozen(model(0).requires_grad_(False), layout) == mine, "what is frozen for a while is not among them"
    other = model(0)
    other["head"].weight.data += 1
    assert digest_of_frozen(other, layout) == mine
    assert digest_of_frozen(nn.Linear(2, 1), split(describe(nn.Linear(2, 1)), 1)) == ""


# --- fragments ---------------------------------------------------------------------------------------


def test_buffers_travel_with_the_last_fragment() -> None:
    layout = split(describe(Tied()), 3)
    assert [spec.name for spec in layout[-1] if spec.kind == "buffer"] == [
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert not [spec for fragment in layout[:-1] for spec in fragment if spec.kind == "buffer"]


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
