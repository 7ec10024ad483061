"""Which tensors of a model travel, under which names, and how they are found again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch.algorithms.layout import Layout, split
from gradientmail_torch.algorithms.model_tensors import describe, digest_of_frozen, held_by, tensors_of, travelling
from gradientmail_torch.errors import ConfigError, RunMismatch
from gradientmail_torch.messages import TensorSpec


def spec(name: str, *shape: int, **changes: object) -> TensorSpec:
    return TensorSpec(**{"name": name, "shape": shape, "dtype": "float32", **changes})  # type: ignore[arg-type]


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
    offloaded = model(0)
    offloaded["base"].to("meta")
    assert digest_of_frozen(offloaded, layout) == ""
