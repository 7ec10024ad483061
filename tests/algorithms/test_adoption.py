"""What a learner keeps of its own progress, by what has become of its contribution."""

from __future__ import annotations

import pytest

from gradientmail_torch.algorithms.adoption import Keep, Outcome, what_to_keep


@pytest.mark.parametrize(
    ("outcome", "keep"),
    [
        (None, Keep.ALL),
        (Outcome.OPEN, Keep.ALL),
        (Outcome.MERGED, Keep.SINCE_SNAPSHOT),
        (Outcome.RETRY, Keep.ALL),
        (Outcome.REJECTED, Keep.NONE),
    ],
)
def test_what_is_kept(outcome: Outcome | None, keep: Keep) -> None:
    assert what_to_keep(outcome) is keep


def test_the_table_covers_every_outcome() -> None:
    assert {what_to_keep(outcome) for outcome in Outcome} == set(Keep)
