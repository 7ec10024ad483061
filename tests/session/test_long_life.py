"""What a long run leaves in the bucket and in memory does not grow. ``python -m tests.session.long_life`` lives longer."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, encode
from gradientmail_torch.session import Session
from gradientmail_torch.session.observer import Observer
from gradientmail_torch.testing.clock import ManualClock
from tests.session.long_life import Figures, Life, resident

MIB = 1 << 20


@pytest.fixture(scope="module")
def figures() -> list[Figures]:
    """Of a run whose second node is replaced every hundred rounds, at every fiftieth round."""
    life = Life(life_rounds=100)
    found = []
    for rounds in range(50, 801, 50):
        life.live(rounds)
        found.append(life.figures())
    return found


def half(figures: list[Figures], which: int) -> list[Figures]:
    return figures[len(figures) // 2 :] if which else figures[2 : len(figures) // 2]


def test_objects_and_bytes_do_not_grow_with_the_rounds(figures: list[Figures]) -> None:
    for kind in ("rounds", "claims", "data", "init", "run.json"):
        early, late = ([each.objects.get(kind, 0) for each in half(figures, which)] for which in (0, 1))
        assert max(late) <= 1.5 * max(early) + 5, kind
    early, late = ([each.bounded_bytes for each in half(figures, which)] for which in (0, 1))
    assert max(late) <= 1.5 * max(early)


def test_a_round_leaves_one_small_record(figures: list[Figures]) -> None:
    for each in figures:
        assert each.objects["commits"] <= each.rounds + 4
        assert each.bytes["commits"] <= 2000 * each.objects["commits"]
        assert each.objects["learners"] == each.lives
        assert each.objects["beats"] <= each.lives


def test_what_a_session_holds_does_not_grow_with_the_rounds(figures: list[Figures]) -> None:
    names = {name for each in figures for name in each.held}
    assert {"retention.seen", "observer.seen", "syncer.watches"} <= names
    for name in names - {"observer.seen", "observer.ended", "membership.peers"}:  # these go by who is there
        early, late = (max(each.held.get(name, 0) for each in half(figures, which)) for which in (0, 1))
        assert late <= 2 * early + 10, name
    assert all(each.held["observer.seen"] <= each.lives for each in figures)


@pytest.mark.parametrize("state", ["ended", "training"])
def test_beats_of_lives_long_gone_are_removed_where_they_are_many(state: str) -> None:
    mailbox, clock = MemoryMailbox(), ManualClock(monotonic=0.0)
    observer = Observer(mailbox, lease=30.0, clock=clock)
    count = 0

    def look(seconds: float) -> None:
        nonlocal count
        for _ in range(int(seconds / 5)):
            count += 1
            mailbox.put(keys.beat("alive", 1), encode(Beat(count=count, state="training")))
            observer.observe()
            clock.advance(5.0)

    for number in range(700):
        mailbox.put(keys.beat(f"gone-{number}", 1), encode(Beat(count=1, state=state)))  # type: ignore[arg-type]
    look(300)
    assert len(list(mailbox.list("beats/"))) == 701, "they may yet come back"
    look(1200)
    assert len(list(mailbox.list("beats/"))) == Observer.MOST_LISTED
    assert observer.observe()["alive"].live
    assert len(observer._seen) <= Observer.MOST_LISTED
    mailbox.put(keys.beat("gone-0", 1), encode(Beat(count=2, state="training")))
    look(5 * 60)
    assert keys.beat("gone-0", 1) in mailbox.list("beats/"), "one that wakes all the same is seen"


# --- a session ---------------------------------------------------------------------------------------


class Handles:
    """What a process holds, at a moment."""

    def __init__(self) -> None:
        gc.collect()
        self.threads = threading.active_count()
        self.files = len(os.listdir("/proc/self/fd"))
        self.resident = resident()


def steps(session: Session, model: nn.Module, count: int) -> None:
    for _ in range(count):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3)
        session.step(samples=1)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("s3_url")) if request.param == "s3" else str(tmp_path / "box")


def test_threads_files_and_memory_of_a_session_stay_flat_over_ten_thousand_steps(place: str) -> None:
    model = nn.Linear(64, 64)
    algorithm = DecoupledDiLoCo(sync_every=100, fragments=2, grace=0.0)
    session = Session(model, mailbox=place, learner_id="a", algorithm=algorithm, poll_interval=0.01, lease=3.0, keep_seconds=0.1)
    with session:
        while min(session.versions) < 3:
            steps(session, model, 50)
        before = Handles()
        steps(session, model, 10_000)
        while min(session.versions) < 20:
            steps(session, model, 50)
        after = Handles()
    assert after.threads <= before.threads + 1
    assert after.files <= before.files + 8  # connections of a pool that is not full yet
    assert after.resident <= before.resident + 24 * MIB
