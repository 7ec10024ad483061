"""Real runs: two learners in threads, on a mailbox in a directory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

from gradientmail_torch import DiLoCo, Session
from gradientmail_torch.algorithms import Algorithm, OuterSGD
from gradientmail_torch.cli.main import app
from gradientmail_torch.patterns.barrier import Barrier

LEARNERS = ("node-a", "node-b")
Command = Callable[..., Result]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train(session: Session, model: nn.Module, steps: int) -> None:
    """Steps that move every parameter, on no data."""
    generator = torch.Generator().manual_seed(sum(session.learner_id.encode()))
    for _ in range(steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
        session.step(samples=8)


def together(*, parties: int = len(LEARNERS), **settings: object) -> Algorithm:
    """All wait for each other every second step, so that it is known how many commits a run has."""
    return DiLoCo(sync_every=2, parties=parties, fragments=2, **settings)  # type: ignore[arg-type]


def join(url: str, learner_id: str, algorithm: Algorithm, *, keep: int | None = None, lease: float = 3.0) -> tuple[Session, nn.Module]:
    model = small_model()
    session = Session(
        model, mailbox=url, learner_id=learner_id, algorithm=algorithm, lease=lease, poll_interval=0.02, keep=keep, keep_seconds=0
    )
    return session, model


def run_together(url: str, algorithm: Algorithm, *, steps: int, keep: int | None = None) -> None:
    """A run of two learners from beginning to end: a commit of each fragment every two steps."""

    def take_part(learner_id: str) -> None:
        session, model = join(url, learner_id, algorithm, keep=keep)
        Barrier(url, learner_id, poll_interval=0.02).wait("start", len(LEARNERS), timeout=60)
        with session:
            train(session, model, steps)
        Barrier(url, learner_id, poll_interval=0.02).wait("done", len(LEARNERS), timeout=60)

    with ThreadPoolExecutor(len(LEARNERS)) as pool:
        for done in [pool.submit(take_part, learner_id) for learner_id in LEARNERS]:
            done.result()


FINISHED = together(outer=OuterSGD(lr=0.9, momentum=0.5), wire="bf16", commit_wire="bf16", whole_every=2)
"""The algorithm of the run below."""


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The mailbox of a run that has ended, with three commits of each fragment. All is kept. Not to be changed."""
    url = str(tmp_path_factory.mktemp("run") / "mailbox")
    run_together(url, FINISHED, steps=6)
    return url


@pytest.fixture
def command() -> Command:
    """Runs ``gradientmail`` with arguments; a failure shows what was printed."""

    def run(*arguments: str, fails: bool = False) -> Result:
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert (result.exit_code != 0) is fails, f"{result.output}\n{result.exception!r}"
        return result

    return run
