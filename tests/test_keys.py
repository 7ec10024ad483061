"""The key grammar: any name is kept, none leaves its place, numbers sort."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradientmail_torch import keys
from gradientmail_torch.errors import ConfigError, InvalidName

NAMES = st.text(st.characters(), min_size=1, max_size=16)
IDS = st.from_regex(keys.LEARNER_ID, fullmatch=True)
SMALL = st.integers(0, 9999)
VERSIONS = st.integers(0, 10**10 - 1)
LIVES = st.integers(0, 10**6 - 1)


@given(NAMES)
def test_any_name_is_one_segment_and_reads_back(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        with pytest.raises(InvalidName):
            keys.encode_name(name)
        return
    segment = keys.encode_name(name)
    assert keys.decode_name(segment) == name
    assert "/" not in segment
    assert keys.check_key(segment) == segment
    assert PurePosixPath("/root", "names", segment).parent == PurePosixPath("/root/names")


@given(NAMES, NAMES)
def test_different_names_have_different_segments(first: str, second: str) -> None:
    try:
        assert (keys.encode_name(first) == keys.encode_name(second)) == (first == second)
    except InvalidName:
        pass


@pytest.mark.parametrize("name", ["", None, 3, b"x", "x" * 201, "ä" * 40, "half \ud800"])
def test_a_name_that_cannot_be_is_refused(name: object) -> None:
    with pytest.raises(InvalidName, match="barrier name"):
        keys.encode_name(name, what="barrier name")  # type: ignore[arg-type]


@pytest.mark.parametrize("learner_id", ["", ".a", "-a", "a/b", "a b", "ä", "a" * 101, None, 3, "a\n"])
def test_a_learner_id_that_cannot_be_is_refused(learner_id: object) -> None:
    with pytest.raises(ConfigError, match="learner_id"):
        keys.check_learner_id(learner_id)  # type: ignore[arg-type]


@given(IDS)
def test_a_learner_id_reads_the_same_in_a_key(learner_id: str) -> None:
    assert keys.check_learner_id(learner_id) == learner_id
    assert keys.encode_name(learner_id) == learner_id


@given(st.text(alphabet="ab./~%\n\\ ", max_size=8))
def test_a_legal_key_stays_below_its_root(key: str) -> None:
    try:
        keys.check_key(key)
    except InvalidName:
        return
    path = PurePosixPath("/root", key)
    assert str(path) == f"/root/{key}"
    assert ".." not in path.parts


@given(SMALL, VERSIONS, IDS)
def test_round_keys_read_back(fragment: int, version: int, learner_id: str) -> None:
    data = keys.data(fragment, version, learner_id, "0123456789abcdef", "delta")
    assert keys.data_owner(data) == learner_id
    assert data.startswith(keys.data_prefix(fragment))
    for key in (keys.contribution(fragment, version, learner_id), data):
        keys.check_key(key)
        assert keys.parse_round(key)[:2] == (fragment, version)
    assert keys.parse_round(keys.contribution(fragment, version, learner_id)).last == learner_id
    assert keys.parse_round(keys.commit(fragment, version)) == (fragment, version, "")
    assert int(keys.parse_round(keys.claim(fragment, version, 7)).last) == 7
    assert keys.contribution(fragment, version, learner_id).startswith(keys.round_prefix(fragment, version))
    assert keys.round_prefix(fragment, version).startswith(keys.round_prefix(fragment))
    assert keys.claim(fragment, version, 7).startswith(keys.claim_prefix(fragment, version))
    assert keys.parse_round(keys.partial(fragment, version, 7)) == (fragment, version, "000007")
    assert keys.partial(fragment, version, 7).startswith(keys.partial_prefix(fragment, version))
    assert keys.commit(fragment, version).startswith(keys.commit_prefix(fragment))


@given(IDS, LIVES)
def test_lives_read_back(learner_id: str, generation: int) -> None:
    assert keys.parse_life(keys.learner(learner_id, generation)) == (learner_id, generation)
    assert keys.parse_life(keys.beat(learner_id, generation)) == (learner_id, generation)
    assert keys.learner(learner_id, generation).startswith(keys.learner_lives(learner_id))


@given(SMALL, st.lists(VERSIONS, min_size=2), IDS)
def test_keys_sort_as_their_numbers(fragment: int, versions: list[int], learner_id: str) -> None:
    for build in (keys.commit, lambda p, v: keys.contribution(p, v, learner_id), lambda p, v: keys.claim(p, v, 1)):
        assert sorted(build(fragment, version) for version in versions) == [build(fragment, version) for version in sorted(versions)]
    assert sorted(keys.learner(learner_id, v % 10**6) for v in versions) == [
        keys.learner(learner_id, v) for v in sorted(v % 10**6 for v in versions)
    ]


@pytest.mark.parametrize(
    "key",
    [
        *("rounds", "rounds/0001", "rounds/x/y/z", "rounds/0001/y/z", "commits/0000/.DS_Store", "rounds/0000/0000000001/"),
        "rounds/0000/0000000001/.DS_Store",
        *("rounds/-001/0000000001/a", "rounds/0/0000000001/a", "rounds/0000/1/a", "rounds/0000/-000000001/a", "rounds/0000/0_00000001/a"),
        *("rounds/0000/٠000000001/a", "rounds/0000/0000000001/a/b", "rounds/0000/00000000001/a", "rounds/0000/+000000001/a"),
    ],
)
def test_a_foreign_key_is_no_round(key: str) -> None:
    with pytest.raises(InvalidName, match="not the key of a round"):
        keys.parse_round(key)


@pytest.mark.parametrize(
    "key", ["learners/a", "learners/a/x", "learners/a/1", "learners/a/-00001", "learners/a/000001/b", "beats/a/.DS_Store", "beats//1_0000"]
)
def test_a_foreign_key_is_no_life(key: str) -> None:
    with pytest.raises(InvalidName, match="not the key of a learner's life"):
        keys.parse_life(key)


@pytest.mark.parametrize("key", ["beats//000001", "beats/a b/000001", "beats/ä/000001", f"beats/{'a' * 101}/000001"])
def test_a_life_has_the_id_of_a_learner(key: str) -> None:
    with pytest.raises(InvalidName, match="not the key of a learner's life"):
        keys.parse_life(key)


@pytest.mark.parametrize("last", ["a b", "ä", "a" * 101, "-a", "a~"])
def test_a_contribution_is_a_learners(last: str) -> None:
    with pytest.raises(InvalidName):
        keys.parse_contribution(f"rounds/0000/0000000001/{last}")


@pytest.mark.parametrize("key", ["commits/0000/0000000001/x", "commits/0000", "rounds/0000/0000000001", "commits/0000/0000000001/"])
def test_a_foreign_key_is_no_commit(key: str) -> None:
    with pytest.raises(InvalidName):
        keys.parse_commit(key)


@given(IDS, st.integers(0, 9999), st.integers(0, 10**10 - 1))
def test_the_data_of_a_contribution_is_where_its_learner_has_put_it(learner_id: str, fragment: int, version: int) -> None:
    key = keys.data(fragment, version, learner_id, "0123abcd", "delta")
    assert keys.is_delta_of(key, fragment, learner_id, "0123abcd")
    assert not keys.is_delta_of(key, fragment + 1, learner_id, "0123abcd")
    assert not keys.is_delta_of(key, fragment, learner_id + "x", "0123abcd")
    assert not keys.is_delta_of(key, fragment, learner_id, "0123abce")
    assert not keys.is_delta_of(key.replace("delta", "whole"), fragment, learner_id, "0123abcd")
    assert not keys.is_delta_of(key.replace("data/", "dada/"), fragment, learner_id, "0123abcd")


@pytest.mark.parametrize("key", ["a" * 256, "a/" + "b" * 256, "/".join(["a" * 200] * 5)])
def test_a_key_that_some_store_could_not_hold_is_refused(key: str) -> None:
    with pytest.raises(InvalidName, match="too long"):
        keys.check_key(key)


@given(NAMES, IDS)
def test_an_arrival_lies_below_its_barrier(name: str, learner_id: str) -> None:
    try:
        key = keys.barrier(name, learner_id)
    except InvalidName:
        return
    assert key == keys.barrier_prefix(name) + learner_id
    assert keys.check_key(key).count("/") == 2
