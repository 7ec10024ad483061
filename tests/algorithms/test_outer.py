"""The outer optimizer: torch.optim.SGD, the golden files, warm-up and buffers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradientmail_torch.algorithms.outer import OuterSGD
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.messages import TensorSpec

GOLDEN = json.loads((Path(__file__).parent / "golden" / "outer.json").read_text())


def parameter(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32")


def path(outer: OuterSGD, start: list[Tensor], deltas: list[list[Tensor]], specs: list[TensorSpec]) -> list[list[Tensor]]:
    """The values after each commit."""
    values, state, seen = start, None, []
    for number, delta in enumerate(deltas, 1):
        values, state = outer.step(values, delta, state, specs, number)
        seen.append(values)
    return seen


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda c: f"{c['lr']}-{c['momentum']}-{'nesterov' if c['nesterov'] else 'plain'}-{c['warmup']}"
)
def test_golden_files_in_float64(case: dict) -> None:
    outer = OuterSGD(lr=case["lr"], momentum=case["momentum"], nesterov=case["nesterov"], warmup=case["warmup"])
    deltas = [[torch.tensor(delta)] for delta in case["deltas"]]
    found = path(outer, [torch.zeros(4)], deltas, [parameter("p", 4)])
    for (ours,), theirs in zip(found, case["path"], strict=True):
        torch.testing.assert_close(ours.double(), torch.tensor(theirs, dtype=torch.float64), rtol=2e-6, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    lr=st.floats(0.01, 2),
    momentum=st.just(0.0) | st.floats(0.01, 0.99),
    nesterov=st.booleans(),
    steps=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
def test_it_is_torchs_sgd_with_the_delta_as_negative_gradient(lr: float, momentum: float, nesterov: bool, steps: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    start = [torch.randn(3, 2, generator=rng), torch.randn((), generator=rng)]
    deltas = [[torch.randn(3, 2, generator=rng), torch.randn((), generator=rng)] for _ in range(steps)]
    specs = [parameter("w", 3, 2), parameter("b")]

    theirs = [torch.nn.Parameter(value.clone()) for value in start]
    sgd = torch.optim.SGD(theirs, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    found = path(OuterSGD(lr=lr, momentum=momentum, nesterov=nesterov, warmup=False), start, deltas, specs)
    for ours, delta in zip(found, deltas, strict=True):
        for p, d in zip(theirs, delta, strict=True):
            p.grad = -d
        sgd.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-5)


def test_the_default_commits_the_merged_parameters() -> None:
    outer = OuterSGD()
    assert not outer.stateful
    (after,), state = outer.step([torch.tensor([1.0, 2.0])], [torch.tensor([0.5, -2.0])], None, [parameter("p", 2)], 7)
    assert after.tolist() == [1.5, 0.0]
    assert state is None


def test_momentum_warms_up_as_one_minus_one_over_the_round() -> None:
    """With a delta of 1 in each round, v = m·v + 1 with m = 0, 1/2, 2/3, then the stated 0.7."""
    outer = OuterSGD(lr=1.0, momentum=0.7, nesterov=False, warmup=True)
    found = path(outer, [torch.zeros(1)], [[torch.ones(1)]] * 4, [parameter("p", 1)])
    velocities = [1.0, 1.5, 2.0, 2.4]
    assert [v[0].item() for v in found] == pytest.approx([sum(velocities[: i + 1]) for i in range(4)])


def test_a_run_whose_first_rounds_had_no_state_starts_its_momentum_later() -> None:
    outer = OuterSGD(lr=1.0, momentum=0.5, nesterov=False, warmup=False)
    _, state = outer.step([torch.zeros(1)], [torch.ones(1)], None, [parameter("p", 1)], 5)
    assert state is not None
    assert state[0].tolist() == [1.0]


def test_buffers_are_taken_as_they_are_and_have_no_state() -> None:
    specs = [parameter("w", 2), TensorSpec(name="mean", shape=(2,), dtype="float32", kind="buffer"), parameter("b", 1)]
    values = [torch.ones(2), torch.ones(2), torch.ones(1)]
    merged = [torch.ones(2), torch.tensor([7.0, 8.0]), torch.ones(1)]
    after, state = OuterSGD(lr=0.5, momentum=0.9, warmup=False).step(values, merged, None, specs, 1)
    assert after[1].tolist() == [7.0, 8.0]
    assert state is not None
    assert [s.shape for s in state] == [(2,), (1,)]
    again, _ = OuterSGD(lr=0.5, momentum=0.9, warmup=False).step(after, merged, state, specs, 2)
    assert again[1].tolist() == [7.0, 8.0]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_values_and_state_are_new_tensors(momentum: float) -> None:
    value, delta, old = torch.ones(2), torch.ones(2), torch.ones(2)
    (after,), state = OuterSGD(momentum=momentum).step([value], [delta], [old] if momentum else None, [parameter("p", 2)], 3)
    after.add_(1)
    for tensor in state or []:
        tensor.add_(1)
    assert value.tolist() == delta.tolist() == old.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("setting", [{"lr": 0.0}, {"lr": -1.0}, {"lr": 11.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_a_bad_setting_is_named(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        OuterSGD(**setting)
