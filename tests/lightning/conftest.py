"""What the tests of Lightning share: small models, quick nodes, and a look into the mailbox."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(SCRIPTS), str(EXAMPLES)]  # their models are used by tests and by the processes that these start

from tiny import ALGORITHM, QUICK  # noqa: E402

from gradientmail_torch import GradientMailStrategy  # noqa: E402
from gradientmail_torch.mailbox import Mailbox  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    advice = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(advice)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For the processes that tests start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GRADIENTMAIL_", "PL_", "AWS_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(SCRIPTS), str(EXAMPLES)])}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _handlers_unchanged() -> Iterator[None]:
    """A fit gives back the signal handlers that it found. (Lightning itself leaves SIGINT ignored after a Ctrl-C.)"""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    after = signal.getsignal(signal.SIGTERM)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before[signal.SIGTERM]


@pytest.fixture
def node(mailbox: Mailbox) -> Callable[..., GradientMailStrategy]:
    """Makes the strategy of a node that lives quickly, in the test's mailbox in memory."""

    def make(learner_id: str = "node", **options: Any) -> GradientMailStrategy:
        return GradientMailStrategy(**{"mailbox": mailbox, "learner_id": learner_id, "algorithm": ALGORITHM, **QUICK, **options})

    return make
