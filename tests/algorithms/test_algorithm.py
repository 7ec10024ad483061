"""The algorithms: their settings, what they share in a run, and when a contribution is due."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo, DiLoCo, LocalSGD, OuterSGD, Pace
from gradientmail_torch.algorithms.algorithm import HEARD_WITHIN_POLLS
from gradientmail_torch.errors import ConfigError

NAN = float("nan")
quick = settings(deadline=None, max_examples=60)

COMMON_FAULTS = [
    *(("sync_every", bad) for bad in (0, -1, 2.5, "20", True, None)),
    *(("fragments", bad) for bad in (0, -2, 1.0, "4")),
    *(("merge", bad) for bad in ("median", "", None)),
    *(("wire", bad) for bad in ("fp16", "", None)),
    *(("buffers", bad) for bad in ("off", 1, None)),
    *(("max_staleness", bad) for bad in (0, 1.5)),
    *(("outer", bad) for bad in (None, 0.7)),
    *(("commit_wire", bad) for bad in ("fp16", None)),
    *(("whole_every", bad) for bad in (0, 2.5, "16")),
    *(("fan_in", bad) for bad in (0, 1, 2.5, True)),
]
DECOUPLED_FAULTS = [
    *(("quorum_size", bad) for bad in (0, "2", 1.0)),
    *(("grace", bad) for bad in (-0.1, NAN, float("inf"), "5")),
    *(("max_grace", bad) for bad in (-1.0, NAN, None)),
    *(("overlap_steps", bad) for bad in (-1, 2.5)),
    *(("round_samples", bad) for bad in (0, -5, 10.0)),
    *(("adoption", bad) for bad in ("merge", "", None)),
]


@pytest.mark.parametrize(("field", "bad"), [*COMMON_FAULTS, *DECOUPLED_FAULTS], ids=str)
def test_each_bad_setting_names_its_field_and_what_it_was(field: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be .* not ") as caught:
        DecoupledDiLoCo(**{field: bad})  # type: ignore[arg-type]
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("algorithm", [DiLoCo, LocalSGD])
@pytest.mark.parametrize(("field", "bad"), [*COMMON_FAULTS, ("parties", 0), ("parties", 2.0)], ids=str)
def test_the_synchronous_ones_too(algorithm: type[Algorithm], field: str, bad: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        algorithm(**{field: bad})  # type: ignore[arg-type]


def test_settings_are_frozen_and_given_by_name() -> None:
    with pytest.raises(FrozenInstanceError):
        DecoupledDiLoCo().sync_every = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        DecoupledDiLoCo(20)  # type: ignore[misc]


def test_defaults_are_the_measured_ones() -> None:
    algorithm = DecoupledDiLoCo()
    assert (algorithm.outer.lr, algorithm.outer.momentum, algorithm.merge, algorithm.wire) == (1.0, 0.0, "auto", "bf16")
    assert (algorithm.quorum, algorithm.calls, algorithm.blocking, algorithm.adoption_rule) == (1, True, False, "rebase")


def test_presets() -> None:
    assert DecoupledDiLoCo.pretrain().outer == OuterSGD(lr=0.7, momentum=0.5)
    assert DecoupledDiLoCo.finetune() == DecoupledDiLoCo(sync_every=20)


def test_diloco_is_the_papers_and_local_sgd_plain_averaging() -> None:
    diloco, local = DiLoCo(parties=4), LocalSGD(parties=4)
    assert (diloco.outer.lr, diloco.outer.momentum, diloco.outer.nesterov, diloco.outer.warmup) == (0.7, 0.9, True, False)
    assert not local.outer.stateful
    for algorithm in (diloco, local):
        assert (algorithm.quorum, algorithm.blocking, algorithm.merge_method(9), algorithm.calls) == (4, True, "mean", False)


def test_what_all_learners_must_share_is_flat_and_in_the_manifest() -> None:
    shared = DecoupledDiLoCo(quorum_size=2, outer=OuterSGD(lr=0.5)).shared()
    assert shared == {
        "name": "DecoupledDiLoCo",
        "merge": "auto",
        "buffers": True,
        "quorum": 2,
        "commit_wire": "bf16",
        "whole_every": 4,
        "fan_in": 32,
        "outer.lr": 0.5,
        "outer.momentum": 0.0,
        "outer.nesterov": True,
        "outer.warmup": True,
    }
    assert "sync_every" in LocalSGD().shared(), "who waits for each other must have the same pace"


def test_nodes_of_different_speed_may_have_different_paces() -> None:
    assert DecoupledDiLoCo(sync_every=5, grace=3, wire="fp32").shared() == DecoupledDiLoCo().shared()


@quick
@given(st.integers(1, 200), st.integers(1, 24))
def test_fragments_are_staggered_over_one_cycle(sync_every: int, fragments: int) -> None:
    algorithm = DecoupledDiLoCo(sync_every=sync_every)
    dues = [algorithm.first_step_due(fragment, fragments) for fragment in range(fragments)]
    assert dues == sorted(dues)
    assert dues[0] >= 1
    assert dues[-1] == sync_every
    assert max(b - a for a, b in zip([0, *dues], dues, strict=False)) <= -(-sync_every // fragments)


def test_the_synchronous_ones_have_everything_due_at_once() -> None:
    assert [DiLoCo(sync_every=7, fragments=3).first_step_due(fragment, 3) for fragment in range(3)] == [7, 7, 7]


@quick
@given(st.integers(1, 10**6), st.integers(0, 64))
def test_a_learners_share_of_a_round_covers_it(round_samples: int, learners: int) -> None:
    share = DecoupledDiLoCo(round_samples=round_samples).samples_due(learners)
    assert share is not None
    assert share >= 1
    assert share * max(1, learners) >= round_samples > (share - 1) * max(1, learners)


def test_without_round_samples_the_steps_decide() -> None:
    assert DecoupledDiLoCo().samples_due(4) is None
    assert DiLoCo().samples_due(4) is None


# --- grace -------------------------------------------------------------------------------------------

floats = st.floats(0, 1e3)


@quick
@given(floats, floats, floats, floats)
def test_an_adaptive_grace_lies_between_nothing_and_its_maximum(step: float, poll: float, merging: float, most: float) -> None:
    pace = Pace(seconds_per_step=step, poll_interval=poll, merge_seconds=merging)
    assert 0 <= DecoupledDiLoCo(max_grace=most).grace_s(pace) <= most


def test_grace_is_the_slack_and_leaves_time_to_answer_a_call() -> None:
    algorithm = DecoupledDiLoCo(sync_every=20, overlap_steps=8)
    assert algorithm.grace_s(Pace(seconds_per_step=2.0, poll_interval=1.0, merge_seconds=4.0)) == 12.0
    assert algorithm.grace_s(Pace(seconds_per_step=0.01, poll_interval=1.0, merge_seconds=4.0)) == HEARD_WITHIN_POLLS
    assert algorithm.grace_s(Pace(seconds_per_step=60.0)) == algorithm.max_grace


def test_updates_are_followed_by_a_whole_value_every_so_often() -> None:
    algorithm = DecoupledDiLoCo(whole_every=4)
    assert [version for version in range(1, 13) if algorithm.commits_whole(version)] == [4, 8, 12]
    assert [algorithm.last_whole(version) for version in (1, 3, 4, 7, 8)] == [0, 0, 4, 4, 8]
    assert all(DecoupledDiLoCo(commit_wire="fp32").commits_whole(version) for version in range(1, 13))


def test_a_stated_grace_is_taken_as_it_is_and_the_synchronous_ones_have_none() -> None:
    pace = Pace(seconds_per_step=9.0)
    assert DecoupledDiLoCo(grace=0.0).grace_s(pace) == 0.0
    assert DecoupledDiLoCo(grace=99.0).grace_s(pace) == 99.0
    assert DiLoCo(parties=2).grace_s(pace) == 0.0
