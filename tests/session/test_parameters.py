"""Access to a model's tensors: what the session reads is a copy, and what it writes is accounted for to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradientmail_torch.algorithms.layout import Layout, split
from gradientmail_torch.algorithms.model_tensors import describe
from gradientmail_torch.errors import RunMismatch
from gradientmail_torch.session.parameters import LocalParameters, difference, initial_values, total

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
by_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
        self.b = nn.Parameter(torch.zeros(1, dtype=dtype))
        self.register_buffer("mean", torch.tensor([0.5, 0.5]))
        self.register_buffer("count", torch.tensor(7))


def access(model: nn.Module, fragments: int = 1) -> tuple[LocalParameters, Layout]:
    layout = split(describe(model), fragments)
    return LocalParameters(model, layout), layout


def values(*w: float, b: float = 0.0, mean: float = 0.0, count: int = 0) -> list[torch.Tensor]:
    return [torch.tensor(w), torch.tensor([b]), torch.tensor([mean, mean]), torch.tensor(count)]


@by_type
def test_a_snapshot_is_in_fp32_and_stays_what_it_was(dtype: torch.dtype) -> None:
    model = Model(dtype)
    reach, _ = access(model)
    snapshot = reach.snapshot(0)
    with torch.no_grad():
        model.w.fill_(9)
        model.mean.fill_(9)
        model.count.fill_(9)
    w, b, mean, count = snapshot()
    assert (w.tolist(), b.tolist(), mean.tolist(), count.item()) == ([1.0, 2.0, 3.0], [0.0], [0.5, 0.5], 7)
    assert [t.dtype for t in (w, b, mean, count)] == [torch.float32] * 3 + [torch.int64]
    assert not w.requires_grad


@by_type
def test_writing_says_what_the_device_holds_afterwards(dtype: torch.dtype) -> None:
    model = Model(dtype)
    reach, _ = access(model)
    held = reach.write(0, values(1.001, -2.0, 300.7, mean=0.25, count=3))
    expected = model.w.detach().float() if dtype.itemsize < 4 else torch.tensor([1.001, -2.0, 300.7])
    assert torch.equal(held[0], expected)
    assert model.mean.tolist() == [0.25, 0.25]
    assert model.count.item() == 3
    assert model.w.dtype == dtype


@by_type
def test_shifting_says_by_how_much_the_parameters_have_really_moved(dtype: torch.dtype) -> None:
    model = Model(dtype)
    reach, _ = access(model)
    before = model.w.detach().float().clone()
    moved = reach.shift(0, values(0.001, 0.001, 0.001, b=1.0, mean=4.0, count=5))
    if dtype.itemsize >= 4:
        assert moved[0] is None
    else:
        assert torch.equal(model.w.detach().float() - before, moved[0])
    assert model.mean.tolist() == [2.25, 2.25], "running statistics go half of the way"
    assert model.count.item() == 7, "counters stay the learner's own"
    assert moved[2:] == [None, None]


@by_type
def test_mixing_goes_part_of_the_way_and_so_do_running_statistics(dtype: torch.dtype) -> None:
    model = Model(dtype)
    reach, _ = access(model)
    reach.mix(0, values(3.0, 4.0, 7.0, mean=4.0, count=5), 0.5)
    assert model.w.tolist() == [2.0, 3.0, 5.0]
    assert model.mean.tolist() == [2.25, 2.25]
    assert model.count.item() == 7


@pytest.mark.parametrize("dtype", [*TYPES, torch.float8_e4m3fn], ids=str)
def test_a_buffer_that_is_as_committed_stays_what_it_is(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1)
    held = torch.tensor([0.1, 3.0, float("-inf"), float("nan"), torch.finfo(dtype).min]).to(dtype)
    model.register_buffer("mask", held.clone())
    reach, _ = access(model)
    *parameters, mask = initial_values(reach, 0)
    reach.shift(0, [torch.zeros_like(each) for each in parameters] + [mask])
    torch.testing.assert_close(model.mask.float(), held.float(), rtol=0, atol=0, equal_nan=True)


def test_a_buffer_that_is_assigned_anew_and_a_parameter_given_other_data_are_followed() -> None:
    model = Model()
    reach, _ = access(model)
    model.w.data = model.w.data + 1
    model.mean = model.mean * 3
    assert [tensor.tolist() for tensor in initial_values(reach, 0)] == [[2.0, 3.0, 4.0], [0.0], [1.5, 1.5], 7]
    reach.shift(0, values(1.0, 1.0, 1.0, mean=0.5))
    assert (model.w.tolist(), model.mean.tolist()) == ([3.0, 4.0, 5.0], [1.0, 1.0])
    reach.write(0, values(5.0, 6.0, 7.0, mean=9.0))
    assert (model.w.tolist(), model.mean.tolist()) == ([5.0, 6.0, 7.0], [9.0, 9.0])


def test_a_buffer_that_changes_its_shape_is_named_with_the_cure() -> None:
    model = Model()
    reach, _ = access(model)
    model.mean = torch.zeros(5)
    with pytest.raises(RunMismatch, match=r"'mean' is .*changes its shape while training stays at home with persistent=False"):
        reach.snapshot(0)


def test_complex_parameters_are_read_shifted_and_written_in_place() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor([1 + 2j]))
    reach, _ = access(model)
    (before,) = initial_values(reach, 0)
    assert before.tolist() == [[1.0, 2.0]]
    reach.shift(0, [torch.tensor([[1.0, -1.0]])])
    assert model.w.tolist() == [2 + 1j]
    reach.write(0, [torch.tensor([[5.0, 6.0]])])
    assert model.w.tolist() == [5 + 6j]


def test_writing_keeps_the_optimizers_hold_on_its_parameters() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reach, _ = access(model)
    reach.write(0, values(1.0, 1.0, 1.0))
    model.w.sum().backward()
    optimizer.step()
    assert model.w.tolist() == [0.0, 0.0, 0.0]


def test_writing_is_no_part_of_a_graph_and_breaks_none_of_the_next_step() -> None:
    model = Model()
    reach, _ = access(model)
    (model.w * 2).sum().backward()
    for change in (lambda: reach.write(0, values(1.0, 1.0, 1.0)), lambda: reach.shift(0, values(1.0, 1.0, 1.0))):
        change()
        assert model.w.grad_fn is None
        assert model.w.requires_grad
    (model.w * 2).sum().backward()


def test_fragments_are_reached_each_by_itself() -> None:
    model = Model()
    reach, layout = access(model, 2)
    assert [[spec.name for spec in specs] for specs in layout] == [["w"], ["b", "mean", "count"]]
    reach.write(1, [torch.tensor([5.0]), torch.tensor([1.0, 1.0]), torch.tensor(1)])
    assert model.w.tolist() == [1.0, 2.0, 3.0]
    assert model.b.tolist() == [5.0]
    assert [t.tolist() for t in initial_values(reach, 0)] == [[1.0, 2.0, 3.0]]


def test_tied_parameters_are_written_once_and_seen_twice() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    reach, layout = access(model)
    assert [spec.name for spec in layout[0]] == ["a.weight"]
    reach.write(0, [torch.full((2, 2), 3.0)])
    assert (model["b"].weight == 3.0).all()


def test_differences_are_of_parameters_and_buffers_stay_values() -> None:
    _, layout = access(Model())
    a, b = values(5.0, 6.0, 7.0, b=1.0, mean=2.0, count=3), values(1.0, 2.0, 3.0, b=1.0, mean=1.0, count=1)
    delta = difference(a, b, layout[0])
    assert [t.tolist() for t in delta] == [[4.0, 4.0, 4.0], [0.0], [2.0, 2.0], 3]
    assert [t.tolist() for t in total(b, delta, layout[0])] == [t.tolist() for t in a]
