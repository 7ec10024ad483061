"""A minute of chaos; ``python -m tests.chaos`` takes ten. And that the books would show what they are kept for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Commit, encode, read
from tests.chaos import report, soak
from tests.chaos.ledger import Ledger, LifeReport
from tests.chaos.schedule import NODE_KINDS, STORE_KINDS, TAIL_S, Incident, Plan, Store
from tests.session.conftest import World

# --- the soak ----------------------------------------------------------------------------------------

MINUTE = [
    Incident(at_s=1.0, kind="kill", seconds=1.0, node="node-0"),
    Incident(at_s=2.0, kind="usurp", seconds=5.0, node="node-1"),
    Incident(at_s=3.0, kind="suspend", seconds=5.0, node="node-2"),
    Incident(at_s=6.0, kind="failing", seconds=6.0),
    Incident(at_s=13.0, kind="outage", seconds=4.0),
    Incident(at_s=18.0, kind="server restart", seconds=0.5),
    Incident(at_s=20.0, kind="slow", seconds=3.0),
]


@pytest.mark.slow
@pytest.mark.s3
@pytest.mark.timeout(600)
def test_a_minute_of_chaos_ends_with_equal_models_and_nothing_lost(tmp_path: Path) -> None:
    plan = Plan(seed=1, seconds=25.0, lease_s=3.0)
    outcome = soak.run(plan, tmp_path / "soak", incidents=MINUTE)
    found = report.write(outcome, None, tmp_path)
    assert not outcome.problems, report.text(found)
    assert {each.incident.kind for each in outcome.happened} == {each.kind for each in MINUTE}
    assert found["equal"]
    assert found["takeovers_of_names"] >= 2
    assert found["commits"] >= 10
    assert any("LearnerFenced" in ended for ended in found["ended_by"]), "the zombie was told that its name is taken"
    assert json.loads((tmp_path / "report.json").read_text())["problems"] == []
    assert (tmp_path / "report.png").stat().st_size > 10_000


# --- the plan ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", get_args(Store))
def test_a_seed_gives_the_same_plan_and_every_kind_is_in_it(store: Store) -> None:
    for seed in range(20):
        plan = Plan(seed=seed, store=store)
        incidents = plan.incidents()
        assert incidents == plan.incidents()
        assert {each.kind for each in incidents} == {*NODE_KINDS, *STORE_KINDS[store]}
        assert [each.at_s for each in incidents] == sorted(each.at_s for each in incidents)
        assert all(each.at_s > 0 and each.until_s <= plan.seconds - TAIL_S + plan.lease_s + 2 for each in incidents)
    assert len({tuple(Plan(seed=seed).incidents()) for seed in range(20)}) == 20


def test_one_thing_at_a_time_befalls_a_node_and_one_node_is_left_alone() -> None:
    for seed in range(50):
        incidents = Plan(seed=seed, seconds=300.0).incidents()
        for a in incidents:
            others = [b for b in incidents if b is not a and b.at_s <= a.at_s < b.until_s]
            assert all(b.node != a.node for b in others)
            assert len({b.node for b in others if b.node} | {a.node}) < 4


# --- the books ---------------------------------------------------------------------------------------


@pytest.fixture
def ended() -> tuple[MemoryMailbox, list[LifeReport]]:
    """A run of two learners that have closed their sessions, and what they say of it."""
    box = MemoryMailbox()
    world = World(box)
    algorithm = DecoupledDiLoCo(sync_every=3, fragments=1, grace=0.0)
    nodes = [world.node(name, algorithm) for name in ("a", "b")]
    for _ in range(20):
        for node in nodes:
            node.train()
        world.turn()
    for node in nodes:
        node.session.close(timeout=100)
    return box, [said(node) for node in nodes]


def said(node: Any) -> LifeReport:
    stats = node.session.stats()
    tally = {"merged_work": vars_of(stats.tally.merged_work), "discarded_work": vars_of(stats.tally.discarded_work)}
    return LifeReport(
        name=node.id, generation=1, steps=stats.steps, samples=stats.samples, digest="same",
        stats={"steps": stats.steps, "samples": stats.samples, "tally": tally},
    )  # fmt: skip


def vars_of(work: Any) -> dict[str, int]:
    return {"steps": work.steps, "samples": work.samples}


def commit(box: MemoryMailbox, version: int) -> Commit:
    found = read(box, Commit, keys.commit(0, version))
    assert found is not None
    return found


def test_sound_books_have_no_problem(ended: tuple[MemoryMailbox, list[LifeReport]]) -> None:
    box, lives = ended
    ledger = Ledger(box)
    assert ledger.check(lives) == []
    assert ledger.useful_samples == sum(life.samples for life in lives)


def test_every_kind_of_loss_shows(ended: tuple[MemoryMailbox, list[LifeReport]]) -> None:
    box, lives = ended
    a, b = lives
    assert a.stats is not None
    kept = {key: box.get(key) or b"" for key in box.list("commits/")}

    def problems(reports: list[LifeReport] = lives) -> str:
        found = "; ".join(Ledger(box).check(reports))
        for key, content in kept.items():
            box.put(key, content)
        return found

    box.delete(keys.commit(0, 2))
    assert "have gaps: [1, 3, 4" in problems()
    box.put(keys.commit(0, 3), encode(msgspec.structs.replace(commit(box, 3), nonce="f" * 32)))
    assert "created twice" in problems()
    double = commit(box, 2).merged
    box.put(keys.commit(0, 3), encode(msgspec.structs.replace(commit(box, 3), merged=double)))
    assert "is in versions 2 and 3" in problems()
    box.put(keys.commit(0, 3), encode(msgspec.structs.replace(commit(box, 3), merged=())))
    assert "counts" in problems()
    assert "nobody has made" in problems([a])
    assert "which has made" in problems([changed(a, steps=1), b])
    less = {**a.stats, "steps": a.stats["steps"] + 1}
    assert "are merged and 0 discarded" in problems([changed(a, stats=less), b])
    assert "2 different models" in problems([changed(a, digest="other"), b])


def changed(life: LifeReport, **changes: Any) -> LifeReport:
    return dataclasses.replace(life, **changes)
