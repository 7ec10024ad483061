"""What is still to come is asked for less and less often, and yet not found much later."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradientmail_torch.session.patience import PATIENCE, Wait


@settings(deadline=None)
@given(st.floats(0.0, 1e6), st.floats(0.1, 1e3), st.sampled_from([0.1, 1.0]))
def test_it_is_found_at_most_an_eighth_of_the_time_and_a_look_later_than_it_came(began: float, takes_s: float, look_s: float) -> None:
    wait, now, asked = Wait(began), began, 0
    while True:
        if wait.is_time(now):
            asked += 1
            if now - began >= takes_s:
                break
        now += look_s
    assert now - began <= (1 + PATIENCE) * takes_s + 2 * look_s + 1e-6 * began
    assert asked <= 90


def test_ten_minutes_cost_some_fifty_looks_instead_of_six_hundred() -> None:
    wait = Wait(0.0)
    asked = [second for second in range(600) if wait.is_time(second)]
    assert asked[:9] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert len(asked) < 55
