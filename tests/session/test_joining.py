"""Constructing a session: what it refuses, what it leaves behind when it fails, and that it can be told from outside."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from gradientmail_torch import keys
from gradientmail_torch.algorithms import DecoupledDiLoCo, DiLoCo, LocalSGD, OuterSGD
from gradientmail_torch.errors import ConfigError, CorruptObject, LearnerIdInUse, MailboxUnavailable, RunMismatch
from gradientmail_torch.mailbox.memory import MemoryMailbox
from gradientmail_torch.messages import Beat, read
from gradientmail_torch.session import Joining, Session
from gradientmail_torch.session.engine import Engine
from gradientmail_torch.session.joining import logged
from gradientmail_torch.testing.clock import ManualClock
from gradientmail_torch.testing.faults import Crash, CrashAfter, Refusals

QUICK = {"lease": 2.0, "poll_interval": 0.02}


def vector(*values: float) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.tensor(values))
    return model


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("gradientmail")}


@pytest.mark.parametrize("learner_id", ["", "a/b", "-a", ".a", "a b", "é", "a" * 101, "a\n", None, 7])
def test_a_learner_id_that_no_key_can_hold_is_refused_before_the_mailbox_is_touched(mailbox: MemoryMailbox, learner_id: Any) -> None:
    with pytest.raises(ConfigError, match=r"learner_id .* cannot be used"):
        Session(vector(1.0), mailbox=mailbox, learner_id=learner_id)
    assert list(mailbox.list("")) == []


@pytest.mark.parametrize("learner_id", ["a", "node-0", "A.b_c-9", "0", "a" * 100])
def test_a_learner_id_of_letters_digits_and_signs_is_taken(mailbox: MemoryMailbox, learner_id: str) -> None:
    session = Session(vector(1.0), mailbox=mailbox, learner_id=learner_id, **QUICK)
    session.close()
    assert read(mailbox, Beat, keys.beat(learner_id, 1)).state == "ended"


@pytest.mark.parametrize("same", [True, False])
def test_frozen_parameters_that_are_not_the_founders_are_warned_of(
    mailbox: MemoryMailbox, caplog: pytest.LogCaptureFixture, same: bool
) -> None:
    for number in range(2):
        model = vector(1.0)
        model.base = nn.Parameter(torch.full((3,), 0.0 if same else float(number)), requires_grad=False)
        Session(model, mailbox=mailbox, learner_id=f"node-{number}", **QUICK).leave()
    assert ("frozen parameters of this model are not those" not in caplog.text) is same


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["none", "frozen"])
def test_a_model_without_trainable_parameters_is_refused_before_the_mailbox_is_touched(mailbox: MemoryMailbox, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="no trainable parameters"):
        Session(model, mailbox=mailbox, learner_id="a")
    assert list(mailbox.list("")) == []


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        *(("lease", bad) for bad in (0, -1.0, float("nan"))),
        *(("poll_interval", bad) for bad in (0, -1.0)),
        *(("outage_timeout", bad) for bad in (0, -1.0)),
        *(("step_timeout", bad) for bad in (0, -1.0)),
        *(("keep", bad) for bad in (0, -1)),
        *(("keep_seconds", bad) for bad in (-1.0, float("nan"))),
    ],
    ids=str,
)
def test_a_bad_setting_is_named(mailbox: MemoryMailbox, field: str, bad: float) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        Session(vector(1.0), mailbox=mailbox, learner_id="a", **{field: bad})
    assert list(mailbox.list("")) == []


def test_a_mailbox_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="mailbox must be a URL or a Mailbox, not int"):
        Session(vector(1.0), mailbox=7, learner_id="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown scheme 'ftp'"):
        Session(vector(1.0), mailbox="ftp://x/y", learner_id="a")


# --- a run of another kind -----------------------------------------------------------------------------


@pytest.fixture
def founded(mailbox: MemoryMailbox) -> MemoryMailbox:
    Session(vector(1.0, 2.0), mailbox=mailbox, learner_id="founder", algorithm=DecoupledDiLoCo(), **QUICK).close()
    return mailbox


@pytest.mark.parametrize(
    ("model", "algorithm", "text"),
    [
        (vector(1.0), DecoupledDiLoCo(), r"tensor 'w' has shape \(1,\) here and \(2,\) in the run"),
        (nn.Linear(2, 2), DecoupledDiLoCo(), "tensor 'w' is in the run only"),
        (vector(1.0, 2.0), DecoupledDiLoCo(quorum_size=2), "setting 'quorum' is 2 here and 1 in the run: all learners must share it"),
        (vector(1.0, 2.0), DecoupledDiLoCo(outer=OuterSGD(lr=0.5)), r"setting 'outer.lr' is 0.5 here and 1.0 in the run"),
        (vector(1.0, 2.0), DecoupledDiLoCo(merge="rda"), "setting 'merge' is 'rda' here and 'auto' in the run"),
        (vector(1.0, 2.0), LocalSGD(), "setting 'name' is 'LocalSGD' here and 'DecoupledDiLoCo' in the run"),
        (vector(1.0, 2.0), DiLoCo(parties=2), "setting 'name' is 'DiLoCo'"),
    ],
)
def test_another_layout_or_algorithm_is_refused_with_the_first_difference(
    founded: MemoryMailbox, model: nn.Module, algorithm: Any, text: str
) -> None:
    with pytest.raises(RunMismatch, match=text):
        Session(model, mailbox=founded, learner_id="b", algorithm=algorithm, **QUICK)
    assert read(founded, Beat, keys.beat("b", 1)).state == "ended", "nobody waits for one that was refused"
    assert threads() == set()


def test_settings_that_may_differ_from_node_to_node_may(founded: MemoryMailbox) -> None:
    algorithm = DecoupledDiLoCo(sync_every=3, wire="fp32", grace=1.0, adoption="overwrite")
    session = Session(vector(9.0, 9.0), mailbox=founded, learner_id="b", algorithm=algorithm, **QUICK)
    session.close()


def test_who_joins_takes_the_runs_parameters(founded: MemoryMailbox) -> None:
    model = vector(9.0, 9.0)
    Session(model, mailbox=founded, learner_id="b", **QUICK).close()
    assert model.w.tolist() == [1.0, 2.0]


def test_a_run_whose_initial_value_is_gone_is_refused_with_the_cure(founded: MemoryMailbox) -> None:
    for key in list(founded.list("init/")):
        founded.delete(key)
    with pytest.raises(CorruptObject, match="the initial value of fragment 0, is gone: restore it or start a new run"):
        Session(vector(9.0, 9.0), mailbox=founded, learner_id="b", **QUICK)
    assert threads() == set()


# --- failing half-way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["learners/", "beats/", "init/", "run.json"])
def test_a_constructor_that_fails_leaves_no_thread_and_can_be_called_again(mailbox: MemoryMailbox, where: str) -> None:
    left = 1

    def refuses(operation: str, key: str) -> bool:
        nonlocal left
        if not operation.startswith("put") or not key.startswith(where) or left == 0:
            return False
        left -= 1
        return True

    box = Refusals(mailbox, refuses)
    try:
        session = Session(vector(1.0), mailbox=box, learner_id="a", **QUICK)
    except MailboxUnavailable:
        assert threads() == set()
        session = Session(vector(1.0), mailbox=box, learner_id="a", **QUICK)
    session.step(1)
    session.close()
    assert threads() == set()


@pytest.mark.parametrize("where", ["learners/", "init/", "run.json"])
def test_a_founder_that_dies_half_way_leaves_a_run_that_can_be_founded_or_joined(mailbox: MemoryMailbox, where: str) -> None:
    box = CrashAfter(mailbox, lambda operation, key: operation.startswith("put") and key.startswith(where))
    with pytest.raises(Crash):
        Session(vector(1.0), mailbox=box, learner_id="a", **QUICK)
    model = vector(5.0)
    Session(model, mailbox=mailbox, learner_id="b", **QUICK).close()
    assert model.w.tolist() == [1.0 if where == "run.json" else 5.0]
    assert threads() == set()


def test_a_heartbeat_while_the_engine_starts_finds_what_it_needs(mailbox: MemoryMailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Engine.start

    def beating(engine: Engine, *args: Any, **kwargs: Any) -> None:
        engine._membership.beat()
        start(engine, *args, **kwargs)

    monkeypatch.setattr(Engine, "start", beating)
    Session(vector(1.0), mailbox=mailbox, learner_id="a", **QUICK).close()


def test_an_id_in_use_is_refused_and_the_one_who_has_it_goes_on(mailbox: MemoryMailbox) -> None:
    model = vector(1.0)
    with Session(model, mailbox=mailbox, learner_id="a", **QUICK) as first:
        with pytest.raises(LearnerIdInUse, match=r"'a' is in use in memory://.*Give each node an ID of its own"):
            Session(vector(1.0), mailbox=mailbox, learner_id="a", **QUICK)
        first.step(1)
    assert first.stats().tally.merged_work.steps == 1


def test_an_id_that_was_closed_is_free_at_once(mailbox: MemoryMailbox) -> None:
    for generation in (1, 2, 3):
        session = Session(vector(1.0), mailbox=mailbox, learner_id="a", lease=600.0, poll_interval=0.02)
        assert session._membership.life.generation == generation
        session.close()
    assert list(mailbox.list("beats/")) == [keys.beat("a", 3)], "an old life's beat is removed"


def test_who_joins_is_told_how_many_bytes_have_come(mailbox: MemoryMailbox) -> None:
    """The founder of what it publishes first; everyone of what it loads, fragment by fragment to the last byte."""
    algorithm = DecoupledDiLoCo(fragments=2)
    heard: dict[str, list[Joining]] = {"a": [], "b": []}
    for learner_id, said in heard.items():
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
        Session(model, mailbox=mailbox, learner_id=learner_id, algorithm=algorithm, on_join=said.append, **QUICK).close()
    total = 4 * (8 + 12)
    assert {joining.bytes_total for said in heard.values() for joining in said} == {total}
    published = [joining.bytes_done for joining in heard["a"] if joining.phase == "publishing"]
    assert published == sorted(published)
    assert published[0] == 0
    for said in heard.values():
        loaded = [joining.bytes_done for joining in said if joining.phase == "loading"]
        assert loaded == sorted(loaded)
        assert (loaded[0], loaded[-1]) == (0, total)
    assert {joining.phase for joining in heard["b"]} == {"loading"}


def test_without_a_listener_only_what_takes_long_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    caplog.set_level("INFO")
    say = logged("a", clock)
    for done in (0, 10, 20):
        say(Joining(phase="loading", bytes_done=done * 10**6, bytes_total=20 * 10**6))
        clock.advance(3.0)
    assert [record.getMessage() for record in caplog.records] == ["a joins: loading parameters, 20 of 20 MB"]
