"""Launches and settings that cannot work are refused at set-up, with the cure in the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry
from tiny import Tiny, numbers, quiet_trainer

from gradientmail_torch import DecoupledDiLoCo, GradientMailDDPStrategy, GradientMailFSDP2Strategy, GradientMailStrategy
from gradientmail_torch.callbacks import GradientMailCallback
from gradientmail_torch.errors import ConfigError, LearnerIdInUse, MailboxDenied, MailboxMissing, RunMismatch
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.session import Session
from gradientmail_torch.testing.s3_server import S3Server

Node = Callable[..., GradientMailStrategy]
STRATEGIES = (GradientMailStrategy, GradientMailDDPStrategy, GradientMailFSDP2Strategy)


def fit(strategy: Any, **options: Any) -> None:
    quiet_trainer(strategy=strategy, **options).fit(Tiny(), numbers())


# --- launchers -----------------------------------------------------------------------------------------


def test_several_processes_on_one_device_each_are_refused(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torchrun --nproc-per-node=2`` with this strategy would train two learners under one name."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"2 processes were launched .* use GradientMailDDPStrategy"):
        fit(node())


def test_several_devices_for_one_process_are_refused(node: Node) -> None:
    with pytest.raises(ConfigError, match="devices=2 with GradientMailStrategy, which drives one: use GradientMailDDPStrategy"):
        fit(node(), devices=2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_launcher_that_spans_nodes_is_refused(strategy: type, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"3 nodes share one launcher .*'torchrun --standalone"):
        fit(strategy(mailbox, learner_id="node"))


@pytest.mark.parametrize("strategy", [GradientMailDDPStrategy, GradientMailFSDP2Strategy])
def test_num_nodes_is_refused(strategy: type, mailbox: Mailbox) -> None:
    with pytest.raises(ConfigError, match="set num_nodes=1 and start each node on its own"):
        fit(strategy(mailbox, learner_id="node"), num_nodes=2)


def test_num_nodes_is_refused_also_with_one_device(node: Node) -> None:
    with pytest.raises(ConfigError, match="set num_nodes=1 and start each node on its own"):
        fit(node(), num_nodes=2)


def test_a_callback_beside_the_strategy_is_refused(node: Node, mailbox: Mailbox) -> None:
    with pytest.raises(ConfigError, match="takes part by itself: remove GradientMailCallback"):
        fit(node(), callbacks=[GradientMailCallback(mailbox, learner_id="node")])


# --- devices -------------------------------------------------------------------------------------------


def test_the_device_is_the_trainers(node: Node) -> None:
    """A SingleDeviceStrategy that is given as an object stays on the CPU whatever the Trainer says; this one follows."""
    strategy = node()
    quiet_trainer(strategy=strategy, accelerator="cpu")
    assert strategy.parallel_devices == [torch.device("cpu")]
    strategy.parallel_devices = [torch.device("cuda", 3)]  # what the Trainer sets with accelerator="gpu", devices=[3]
    assert strategy.root_device == torch.device("cuda", 3)


# --- the mailbox ---------------------------------------------------------------------------------------


def test_no_mailbox_names_the_argument_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADIENTMAIL_MAILBOX", raising=False)
    with pytest.raises(ConfigError, match=r"pass mailbox=.* or set GRADIENTMAIL_MAILBOX"):
        fit(GradientMailStrategy())


def test_mailbox_and_name_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", str(tmp_path))
    monkeypatch.setenv("GRADIENTMAIL_LEARNER_ID", "from-outside")
    strategy = GradientMailStrategy(poll_interval=0.05)
    fit(strategy)
    assert strategy.learner_id == "from-outside"
    assert (tmp_path / "learners" / "from-outside").is_dir()


def test_a_made_up_name_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADIENTMAIL_LEARNER_ID", raising=False)
    assert GradientMailStrategy("x").learner_id == GradientMailStrategy("x").learner_id


def test_an_unknown_scheme_is_refused_before_the_model_is_set_up(node: Node) -> None:
    class NotSetUp(Tiny):
        def setup(self, stage: str) -> None:
            raise AssertionError("too late")

    with pytest.raises(ConfigError, match="unknown scheme 'ftp'"):
        quiet_trainer(strategy=node(mailbox="ftp://host/run")).fit(NotSetUp(), numbers())


@pytest.mark.s3
def test_a_bucket_without_permission_is_refused(node: Node, s3_server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.reader_env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MailboxDenied, match="Check the credentials; they need GetObject, PutObject, DeleteObject and ListBucket"):
        fit(node(mailbox=s3_url))


@pytest.mark.s3
def test_a_bucket_that_does_not_exist_is_refused(node: Node, s3_server: S3Server, s3_credentials: None) -> None:
    with pytest.raises(MailboxMissing, match="Create the bucket"):
        fit(node(mailbox=f"s3://no-such-bucket/run?endpoint_url={s3_server.endpoint_url}"))


# --- the run -------------------------------------------------------------------------------------------


def test_a_name_in_use_is_refused(node: Node, mailbox: Mailbox) -> None:
    with (
        Session(Tiny(), mailbox=mailbox, learner_id="node", poll_interval=0.05, lease=3.0),
        pytest.raises(LearnerIdInUse, match="node"),
    ):
        fit(node())


def test_another_models_run_is_refused(node: Node, mailbox: Mailbox) -> None:
    fit(node("a"))
    model = Tiny(middle=torch.nn.BatchNorm1d(3))
    with pytest.raises(RunMismatch, match=r"tensor 'layers\.1\.weight' is in this model only"):
        quiet_trainer(strategy=node("b")).fit(model, numbers())


def test_another_algorithm_is_refused(node: Node, mailbox: Mailbox) -> None:
    fit(node("a"))
    with pytest.raises(RunMismatch, match="algorithm setting 'quorum' is 2 here and 1 in the run"):
        fit(node("b", algorithm=DecoupledDiLoCo(sync_every=2, fragments=2, wire="fp32", commit_wire="fp32", quorum_size=2)))


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"learner_id": "a/b"}, "a/b"),
        ({"start_parties": 0}, "start_parties must be None or a whole number of at least 1, not 0"),
        ({"done_parties": 1.5}, "done_parties must be None or a whole number of at least 1, not 1.5"),
        ({"exchange_every": 0}, "exchange_every must be at least 1, not 0"),
        ({"poll_interval": 0}, "poll_interval must be None or above 0 seconds, not 0"),
        ({"lease": -1}, "lease must be above 0 seconds, not -1"),
        ({"start_timeout": -1}, "start_timeout must be None or at least 0 seconds, not -1"),
        ({"leave_timeout": -1}, "leave_timeout must be at least 0 seconds, not -1"),
        ({"close_timeout": None}, "close_timeout must be at least 0 seconds, not None"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_settings_that_cannot_be_are_refused_at_once(strategy: type, setting: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        strategy("memory://x", **setting)


def test_the_strategies_have_names_of_their_own_in_lightnings_registry() -> None:
    registered = {name: StrategyRegistry[name]["strategy"] for name in ("gradientmail", "gradientmail_ddp", "gradientmail_fsdp2")}
    assert tuple(registered.values()) == STRATEGIES
