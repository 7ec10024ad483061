"""How long a mailbox has been away."""

from __future__ import annotations

from gradientmail_torch.mailbox.absence import Absence
from gradientmail_torch.testing import ManualClock


def test_it_counts_from_the_first_failure_and_starts_afresh_after_an_answer() -> None:
    clock = ManualClock()
    absence = Absence(clock)
    clock.sleep(1000)
    assert absence.failed() == 0
    clock.sleep(20)
    assert absence.failed() == 20
    clock.sleep(30)
    assert absence.failed() == 50
    absence.answered()
    clock.sleep(5)
    assert absence.failed() == 0


def test_the_sleep_of_this_machine_hardly_counts() -> None:
    clock = ManualClock()
    absence = Absence(clock)
    absence.failed()
    clock.sleep(5000)
    assert absence.failed() == 60
