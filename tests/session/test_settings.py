"""How often a session looks at the mailbox."""

from __future__ import annotations

import pytest

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.session.settings import Settings


@pytest.mark.parametrize(("cycle_s", "look_s"), [(0.02, 0.1), (2.0, 0.1), (6.0, 0.3), (20.0, 1.0), (600.0, 1.0), (float("inf"), 1.0)])
def test_left_alone_it_looks_twenty_times_a_cycle_within_bounds(cycle_s: float, look_s: float) -> None:
    assert Settings().look_interval(cycle_s) == pytest.approx(look_s)


@pytest.mark.parametrize("cycle_s", [0.02, 600.0])
def test_a_given_interval_is_kept(cycle_s: float) -> None:
    assert Settings(poll_interval=0.25).look_interval(cycle_s) == Settings(poll_interval=0.25).longest_look == 0.25


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_an_impossible_interval_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="poll_interval must be None or above 0 seconds"):
        Settings(poll_interval=seconds)
