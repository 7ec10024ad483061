"""When a round closes and who merges it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_torch.algorithms.quorum import (
    RoundView,
    closes,
    delegate_order,
    group_of,
    groups_ahead,
    merge_order,
    quorum_reached,
    waited_for,
)

learner_ids = st.text("abcdefgh0123456789-_.", min_size=1, max_size=6)
uplinks_of = st.dictionaries(learner_ids, st.just(0.0) | st.floats(1, 1e9), min_size=1, max_size=12)
quick = settings(deadline=None, max_examples=100)


def view(contributors: str = "", training: str = "", leaving: str = "") -> RoundView:
    return RoundView(contributors=frozenset(contributors), training=frozenset(training), staying=frozenset(training) - frozenset(leaving))


@pytest.mark.parametrize(
    ("contributors", "training", "leaving", "quorum_size", "reached"),
    [
        ("", "ab", "", 1, False),
        ("a", "ab", "", 1, True),
        ("a", "ab", "", 2, False),
        ("ab", "ab", "", 2, True),
        ("ab", "c", "", 2, True),  # both have died since; their contributions count
        ("a", "ab", "ab", 2, True),  # all are leaving: the quorum is what is left
        ("a", "", "", 3, True),
        ("a", "ab", "a", 2, False),
        ("", "ab", "ab", 1, False),
    ],
)
def test_quorum(contributors: str, training: str, leaving: str, quorum_size: int, reached: bool) -> None:
    assert quorum_reached(view(contributors, training, leaving), quorum_size) is reached


@pytest.mark.parametrize(
    ("contributors", "training", "since", "grace", "closing"),
    [
        ("ab", "ab", 0, 10, True),
        ("abc", "ab", 0, 10, True),
        ("a", "ab", 0, 10, False),
        ("a", "ab", 9.9, 10, False),
        ("a", "ab", 10, 10, True),
        ("a", "ab", 0, 0, True),
        ("a", "", 0, 10, True),
        ("b", "a", 0, 10, False),  # one that has left does not stand for one in training
    ],
)
def test_closing(contributors: str, training: str, since: float, grace: float, closing: bool) -> None:
    assert closes(view(contributors, training), since_quorum_s=since, grace_s=grace) is closing


def test_who_is_waited_for_is_named_in_order() -> None:
    assert waited_for(view("ac", "dbca")) == ["b", "d"]


@quick
@given(uplinks_of, st.integers(0, 30), st.integers(1, 10**6), st.randoms(use_true_random=False))
def test_the_order_is_a_permutation_that_all_agree_on(uplinks: dict[str, float], fragment: int, version: int, rng: object) -> None:
    order = merge_order("run", fragment, version, uplinks)
    assert sorted(order) == sorted(uplinks)
    items = list(uplinks.items())
    rng.shuffle(items)  # type: ignore[attr-defined]
    assert merge_order("run", fragment, version, dict(items)) == order


@quick
@given(uplinks_of, st.data())
def test_one_that_goes_leaves_the_order_of_the_others(uplinks: dict[str, float], data: st.DataObject) -> None:
    level = dict.fromkeys(uplinks, 1.0)
    gone = data.draw(st.sampled_from(sorted(uplinks)))
    order = merge_order("run", 0, 1, level)
    assert merge_order("run", 0, 1, {i: u for i, u in level.items() if i != gone}) == [i for i in order if i != gone]


@quick
@given(uplinks_of, st.integers(1, 100))
def test_learners_far_below_the_median_uplink_come_last(uplinks: dict[str, float], version: int) -> None:
    known = sorted(u for u in uplinks.values() if u > 0)
    middle = (known[(len(known) - 1) // 2] + known[len(known) // 2]) / 2 if known else 0.0
    slow = [0 < uplinks[i] < middle / 3 for i in merge_order("run", 0, version, uplinks)]
    assert slow == sorted(slow)


def test_an_unknown_uplink_is_not_held_against_a_learner() -> None:
    orders = [merge_order("run", 0, version, {"new": 0.0, "fast": 9.0, "faster": 10.0, "slow": 1.0}) for version in range(50)]
    assert all(order[-1] == "slow" for order in orders)
    assert {order[0] for order in orders} == {"new", "fast", "faster"}


def test_over_fragments_and_versions_the_work_spreads_evenly() -> None:
    learners = {f"node-{number}": 1e6 for number in range(8)}
    firsts = Counter(merge_order("0123abcd", fragment, version, learners)[0] for fragment in range(24) for version in range(1, 101))
    assert len(firsts) == 8
    assert all(240 <= count <= 360 for count in firsts.values()), firsts


def test_another_run_has_another_order() -> None:
    learners = dict.fromkeys("abcdefgh", 1.0)
    assert merge_order("one", 0, 1, learners) != merge_order("two", 0, 1, learners)


# --- groups that are summed ahead --------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "groups"), [(0, 0), (1, 0), (32, 0), (33, 2), (64, 2), (65, 3), (1024, 32)])
def test_groups_of_the_fan_in_where_there_are_more(before: int, groups: int) -> None:
    assert groups_ahead(before, 32) == groups


def test_every_learner_is_in_one_group_and_the_groups_are_of_about_one_size() -> None:
    sizes = Counter(group_of("run", f"node-{number}", 32) for number in range(1024))
    assert sizes.keys() == {*range(32)}
    assert max(sizes.values()) <= 2 * 32
    assert [group_of("run", "a", 3), group_of("run", "b", 3)] == [group_of("run", "a", 3), group_of("run", "b", 3)]


def test_who_sums_a_group_is_not_who_merges_the_round() -> None:
    learners = {f"node-{number}": 0.0 for number in range(16)}
    same = sum(delegate_order("run", 0, v, learners)[0] == merge_order("run", 0, v, learners)[0] for v in range(200))
    assert same < 40
