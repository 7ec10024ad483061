"""Which rounds are open, at a number of listings that does not grow with the number of learners."""

from __future__ import annotations

import pytest

from gradientmail_torch import keys
from gradientmail_torch.mailbox import CountingMailbox
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.session.round_listing import PAGE_KEYS, contributions, opened_rounds

LEARNERS = 400


@pytest.fixture
def box() -> CountingMailbox:
    return CountingMailbox(MemoryMailbox())


def open_round(box: CountingMailbox, fragment: int, version: int, learners: int = LEARNERS) -> None:
    for number in range(learners):
        box.inner.put(keys.contribution(fragment, version, f"node-{number:04}"), b"")


def seen(listing: list[str]) -> set[tuple[int, int]]:
    return {(found.fragment, found.version) for found in map(keys.parse_contribution, listing)}


def look(box: CountingMailbox, known: dict[int, int], looks: int) -> list[str]:
    """What so many looks show, one after the other; each is one page."""
    before = box.usage.requests.get("list", 0)
    begin, found = 0, []
    for _ in range(looks):
        page, begin = opened_rounds(box, known, begin)
        found += page
    assert box.usage.requests.get("list", 0) == before + looks
    return found


def test_every_round_that_matters_is_seen_and_the_others_are_leapt_over(box: CountingMailbox) -> None:
    for fragment in range(24):
        open_round(box, fragment, 7)
    assert [key for key in look(box, {3: 6}, 1) if key.startswith("rounds/0003/")] == [
        keys.contribution(3, 7, "node-0000"), keys.contribution(3, 7, "node-0001")
    ]  # fmt: skip
    assert {(0, 7), (23, 7)} <= seen(look(box, {0: 6, 23: 6}, 2))
    assert {(0, 7), (23, 7)} <= seen(look(box, dict.fromkeys(range(24), 6), 24))


def test_nothing_that_matters_costs_nothing(box: CountingMailbox) -> None:
    assert opened_rounds(box, {}, 5) == ([], 0)
    assert box.usage.requests.get("list", 0) == 0


def test_where_all_is_on_one_page_each_look_shows_all(box: CountingMailbox) -> None:
    for fragment in range(3):
        open_round(box, fragment, 7, 100)
    for _ in range(3):
        assert seen(look(box, {0: 6, 1: 6, 2: 6}, 1)) == {(0, 7), (1, 7), (2, 7)}


def test_a_round_that_fills_pages_does_not_hide_those_after_it(box: CountingMailbox) -> None:
    open_round(box, 0, 7, PAGE_KEYS + 200)
    open_round(box, 1, 7, 1)
    open_round(box, 2, 7, PAGE_KEYS + 200)
    assert seen(look(box, {0: 6, 1: 6, 2: 6}, 2)) == {(0, 7), (1, 7), (2, 7)}


def test_after_the_last_it_begins_anew(box: CountingMailbox) -> None:
    for fragment in range(3):
        open_round(box, fragment, 7, PAGE_KEYS)
    order = [key for key in look(box, {0: 6, 1: 6, 2: 6}, 6) if key.endswith("node-0000")]
    assert [keys.parse_contribution(key).fragment for key in order] == [0, 1, 2, 0, 1, 2]


def test_records_that_are_still_to_be_swept_hide_nothing(box: CountingMailbox) -> None:
    open_round(box, 0, 7, 1)
    open_round(box, 1, 6, PAGE_KEYS + 200)  # committed
    open_round(box, 1, 7, 1)
    assert {(0, 7), (1, 7)} <= seen(look(box, {0: 6, 1: 6}, 2))


def test_a_page_of_other_peoples_objects_hides_nothing_for_long(box: CountingMailbox) -> None:
    for number in range(PAGE_KEYS):
        box.inner.put(f"rounds/0000/stray-{number:04}", b"")
    open_round(box, 1, 7, 1)
    assert (1, 7) in seen([key for key in look(box, {0: 6, 1: 6}, 2) if "stray" not in key])


def test_one_round_is_listed_wholly(box: CountingMailbox) -> None:
    open_round(box, 0, 7)
    open_round(box, 0, 8, 1)
    assert len(contributions(box, 0, 7)) == LEARNERS
