"""Each callback alone, with any strategy, and beside the strategy."""

from __future__ import annotations

import csv
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from prometheus_client.parser import text_string_to_metric_families
from tiny import ALGORITHM, QUICK, Tiny, digest, numbers, quiet_trainer

from gradientmail_torch import GradientMailStrategy, Session, align, keys
from gradientmail_torch.callbacks import (
    AlignOnValidation,
    DoneBarrier,
    EpochBarrier,
    GradientMailCallback,
    GradientMailProgressBar,
    PrometheusEndpoint,
    RoundMonitor,
    StartBarrier,
)
from gradientmail_torch.errors import ConfigError, RunMismatch, RunTimeout
from gradientmail_torch.lightning import joinbar
from gradientmail_torch.mailbox import Mailbox
from gradientmail_torch.patterns.barrier import Barrier
from gradientmail_torch.session.run import Run
from gradientmail_torch.testing.faults import Refusals

Node = Callable[..., GradientMailStrategy]
ME: dict[str, Any] = {"learner_id": "me", "poll_interval": 0.05}


def arrivals(mailbox: Mailbox) -> list[str]:
    return sorted(mailbox.list("barriers/"))


def steps_in_run(mailbox: Mailbox) -> int:
    run = Run.open(mailbox)
    assert run is not None
    steps, version = 0, 1
    while (commit := run.commit(0, version)) is not None:
        steps += sum(merged.steps for merged in commit.merged)
        version += 1
    return steps


# --- barriers ------------------------------------------------------------------------------------------


class Meets:
    """Another node that goes through barriers in a thread."""

    def __init__(self, mailbox: Mailbox, *names: str) -> None:
        barrier = Barrier(mailbox, "other", poll_interval=0.05)
        self._thread = threading.Thread(target=lambda: [barrier.wait(name, parties=2) for name in names])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join()


def test_barriers_hold_a_node_under_any_strategy(mailbox: Mailbox) -> None:
    barriers = [barrier(2, mailbox, **ME) for barrier in (StartBarrier, EpochBarrier, DoneBarrier)]
    names = ("start", "epoch-0", "epoch-1", "done")
    with Meets(mailbox, *names):
        quiet_trainer(max_epochs=2, callbacks=barriers).fit(Tiny(), numbers())
    assert arrivals(mailbox) == sorted(f"barriers/{name}/{who}" for name in names for who in ("me", "other"))


def test_barriers_take_place_and_name_from_the_strategy(node: Node, mailbox: Mailbox) -> None:
    barriers = [barrier(1, poll_interval=0.05) for barrier in (StartBarrier, EpochBarrier, DoneBarrier)]
    quiet_trainer(strategy=node(), callbacks=barriers).fit(Tiny(), numbers())
    assert arrivals(mailbox) == ["barriers/done/node", "barriers/epoch-0/node", "barriers/start/node"]


def test_a_barriers_own_mailbox_and_name_come_first(node: Node, mailbox: Mailbox) -> None:
    elsewhere = type(mailbox)()  # type: ignore[call-arg]
    barriers = [StartBarrier(1, elsewhere, **ME), EpochBarrier(1, learner_id="me")]
    quiet_trainer(strategy=node(), callbacks=barriers).fit(Tiny(), numbers())
    assert arrivals(elsewhere) == ["barriers/start/me"]
    assert arrivals(mailbox) == ["barriers/epoch-0/me"]


def test_without_a_strategy_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIENTMAIL_MAILBOX", str(tmp_path))
    monkeypatch.setenv("GRADIENTMAIL_LEARNER_ID", "me")
    quiet_trainer(callbacks=[StartBarrier(1)]).fit(Tiny(), numbers())
    assert (tmp_path / "barriers" / "start" / "me").exists()


def test_start_and_epoch_barriers_that_run_out_of_time_end_training(mailbox: Mailbox) -> None:
    for barrier in (StartBarrier, EpochBarrier):
        with pytest.raises(RunTimeout, match=r"1 of 2 learners arrived within 0.1 s"):
            quiet_trainer(callbacks=[barrier(2, mailbox, **ME, timeout=0.1)]).fit(Tiny(), numbers())


def test_a_done_barrier_that_runs_out_of_time_goes_on_with_a_warning(mailbox: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    quiet_trainer(callbacks=[DoneBarrier(2, mailbox, **ME, timeout=0.1)]).fit(Tiny(), numbers())
    assert "going on without those who have not arrived" in caplog.text


def test_a_done_barrier_loads_the_run_if_there_is_one(mailbox: Mailbox) -> None:
    run, own = Tiny(), Tiny()
    with Session(run, mailbox=mailbox, learner_id="founder", algorithm=ALGORITHM, **QUICK):
        pass
    quiet_trainer(callbacks=[DoneBarrier(1, mailbox, **ME, align=False)]).fit(own, numbers())
    assert digest(own) != digest(run)
    quiet_trainer(callbacks=[DoneBarrier(1, mailbox, **ME)]).fit(own, numbers())
    assert digest(own) == digest(run)


def test_fast_dev_run_passes_all_barriers(mailbox: Mailbox) -> None:
    barriers = [barrier(9, mailbox, **ME) for barrier in (StartBarrier, EpochBarrier, DoneBarrier)]
    quiet_trainer(fast_dev_run=True, callbacks=barriers).fit(Tiny(), numbers(), numbers(shuffle=False))
    assert arrivals(mailbox) == []


@pytest.mark.parametrize("barrier", [StartBarrier, EpochBarrier, DoneBarrier])
def test_bad_settings_are_refused_at_once(barrier: type) -> None:
    for settings in (
        {"parties": 0},
        {"parties": 1, "learner_id": "a/b"},
        {"parties": 1, "timeout": -1},
        {"parties": 1, "poll_interval": 0},
    ):
        with pytest.raises(ConfigError):
            barrier(**settings)


# --- AlignOnValidation ---------------------------------------------------------------------------------


class Watches(Callback):
    """The parameters before, in and after each validation."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.scored: list[str] = []
        self.after: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        self._last = digest(pl_module)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *more: Any) -> None:
        if batch_idx == 0:
            self.before.append(self._last)
            self.scored.append(digest(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after.append(digest(pl_module))


def test_the_runs_parameters_are_scored_and_local_ones_put_back(node: Node, mailbox: Mailbox) -> None:
    watch = Watches()
    trainer = quiet_trainer(strategy=node(), max_epochs=3, callbacks=[AlignOnValidation(), watch])
    trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    assert watch.before == watch.after
    assert watch.scored != watch.before
    assert steps_in_run(mailbox) == 24


def test_local_parameters_are_put_back_also_after_an_exception(node: Node, mailbox: Mailbox) -> None:
    class Fails(Watches):
        def on_validation_batch_start(self, *arguments: Any) -> None:
            super().on_validation_batch_start(*arguments)
            raise ZeroDivisionError

    model, watch = Tiny(), Fails()
    trainer = quiet_trainer(strategy=node(align=False), callbacks=[AlignOnValidation(), watch])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, numbers(), numbers(shuffle=False))
    assert watch.before == [digest(model)]
    assert watch.scored != watch.before
    run = Tiny()
    align(run, mailbox=mailbox)
    assert digest(run) != digest(model)


def test_it_works_alone_under_any_strategy_and_in_validate(mailbox: Mailbox) -> None:
    run, own = Tiny(), Tiny()
    with Session(run, mailbox=mailbox, learner_id="founder", algorithm=ALGORITHM, **QUICK):
        pass
    watch, data = Watches(), numbers(shuffle=False)
    quiet_trainer(callbacks=[AlignOnValidation(mailbox), watch]).fit(own, numbers(), data)
    assert watch.scored == [digest(run)]
    (expected,) = quiet_trainer().validate(run, data, verbose=False)
    before = digest(own)
    (scored,) = quiet_trainer(callbacks=[AlignOnValidation(mailbox)]).validate(own, data, verbose=False)
    assert scored == expected
    assert digest(own) == before


def test_in_validate_the_mailbox_of_the_strategy_is_used(node: Node, mailbox: Mailbox) -> None:
    run = Tiny()
    quiet_trainer(strategy=node()).fit(run, numbers())
    data = numbers(shuffle=False)
    (expected,) = quiet_trainer().validate(run, data, verbose=False)
    (scored,) = quiet_trainer(strategy=node(), callbacks=[AlignOnValidation()]).validate(Tiny(), data, verbose=False)
    assert scored == expected


def test_a_checkpoint_that_validate_was_given_is_scored_itself(node: Node, tmp_path: Path) -> None:
    data, checkpoint = numbers(shuffle=False), tmp_path / "own.ckpt"
    own = Tiny()
    alone = quiet_trainer()
    alone.fit(own, numbers())
    alone.save_checkpoint(checkpoint)
    (expected,) = alone.validate(own, data, verbose=False)
    trainer = quiet_trainer(strategy=node(), callbacks=[AlignOnValidation()])
    trainer.fit(Tiny(), numbers())
    (scored,) = trainer.validate(Tiny(), data, ckpt_path=checkpoint, verbose=False)
    assert scored == expected
    (of_run,) = trainer.validate(Tiny(), data, verbose=False)
    assert of_run != expected


class Arms(Callback):
    """From the end of the first epoch on, two of three readings of the run's manifest meet a store that is away."""

    def __init__(self) -> None:
        self.struck = 0
        self._armed = False

    def strikes(self, operation: str, key: str) -> bool:
        self.struck += self._armed and key == keys.RUN
        return self._armed and key == keys.RUN and self.struck % 3 != 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._armed = True


@pytest.mark.parametrize("callback", [AlignOnValidation, lambda: DoneBarrier(1), None], ids=["validation", "done-barrier", "strategy"])
def test_a_store_that_is_away_is_waited_for(callback: Callable[[], Callback] | None, node: Node, mailbox: Mailbox) -> None:
    arms, model = Arms(), Tiny()
    strategy = node(mailbox=Refusals(mailbox, arms.strikes), align=callback is None)
    callbacks = [arms, *([] if callback is None else [callback()])]
    quiet_trainer(strategy=strategy, max_epochs=2, callbacks=callbacks).fit(model, numbers(), numbers(shuffle=False))
    assert arms.struck >= 3
    assert steps_in_run(mailbox) == 16


def test_without_a_run_it_says_so(mailbox: Mailbox) -> None:
    with pytest.raises(RunMismatch, match="holds no run"):
        quiet_trainer(callbacks=[AlignOnValidation(mailbox)]).validate(Tiny(), numbers(shuffle=False), verbose=False)


def test_without_a_mailbox_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADIENTMAIL_MAILBOX", raising=False)
    with pytest.raises(ConfigError, match="no mailbox is given"):
        quiet_trainer(callbacks=[AlignOnValidation()]).validate(Tiny(), numbers(shuffle=False), verbose=False)


def test_the_sanity_check_scores_what_is_there(node: Node, mailbox: Mailbox) -> None:
    trainer = quiet_trainer(strategy=node(), num_sanity_val_steps=1, callbacks=[AlignOnValidation()])
    trainer.fit(Tiny(), numbers(), numbers(shuffle=False))
    assert steps_in_run(mailbox) == 8


# --- RoundMonitor --------------------------------------------------------------------------------------


def test_the_sessions_figures_are_among_the_loggers_metrics(node: Node, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(strategy=node(), logger=logger, max_epochs=3, log_every_n_steps=4, callbacks=[RoundMonitor()])
    trainer.fit(Tiny(), numbers(32), numbers(shuffle=False))
    rows = [row for row in csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()) if row["gradientmail/round"]]
    assert [int(row["step"]) for row in rows[:5]] == [3, 7, 11, 15, 19]
    last = {name.removeprefix("gradientmail/"): float(value) for name, value in rows[-1].items() if name.startswith("gradientmail/")}
    assert last.keys() == {
        *("round", "learners", "contributed", "staleness_steps", "discarded_steps"),
        *("stall_ms_per_step", "bytes_up", "bytes_down", "requests"),
    }
    assert last["round"] >= 1
    assert last["learners"] == 1
    assert last["contributed"] >= 2
    assert last["discarded_steps"] == 0
    assert last["bytes_up"] > 0
    assert last["requests"] > 0


def test_figures_reach_every_logger_with_a_prefix_of_ones_own(node: Node, tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path / name) for name in ("one", "two")]
    quiet_trainer(strategy=node(), logger=loggers, callbacks=[RoundMonitor(prefix="run/")]).fit(Tiny(), numbers())
    for logger in loggers:
        assert "run/stall_ms_per_step" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_figures_reach_tensorboard(node: Node, tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    quiet_trainer(strategy=node(), logger=logger, callbacks=[RoundMonitor()]).fit(Tiny(), numbers())
    (events,) = Path(logger.log_dir).glob("events.out.tfevents.*")
    assert b"gradientmail/stall_ms_per_step" in events.read_bytes()


@pytest.mark.parametrize(("prefix", "pattern"), [("gradientmail/", r"gradientmail/[a-zA-Z_]\w*"), ("gradientmail_", r"[a-zA-Z_]\w*")])
def test_names_are_such_as_weights_and_biases_takes(prefix: str, pattern: str, node: Node, tmp_path: Path) -> None:
    """One section and a word; with a prefix without a slash, a word that its table of runs can sort and filter by."""
    logger = CSVLogger(tmp_path)
    quiet_trainer(strategy=node(), logger=logger, callbacks=[RoundMonitor(prefix)]).fit(Tiny(), numbers())
    (header, *_) = csv.reader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines())
    ours = [name for name in header if name.startswith("gradientmail")]
    assert len(ours) == 9
    assert [name for name in ours if not re.fullmatch(pattern, name, re.ASCII)] == []


def test_without_a_session_there_is_nothing_to_log(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    quiet_trainer(logger=logger, log_every_n_steps=1, callbacks=[RoundMonitor()]).fit(Tiny(), numbers())
    assert not (Path(logger.log_dir) / "metrics.csv").exists()


# --- PrometheusEndpoint --------------------------------------------------------------------------------


class Scrapes(Callback):
    """Asks the endpoint as Prometheus does."""

    def __init__(self, endpoint: PrometheusEndpoint) -> None:
        self.endpoint = endpoint
        self.found: dict[str, dict[str, float]] = {}
        """Values by the metric's name and the operation where it has one."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        with urlopen(f"http://127.0.0.1:{self.endpoint.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        self.found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                assert sample.labels["learner_id"] == "node"
                self.found.setdefault(sample.name, {})[sample.labels.get("operation", "")] = sample.value


def test_prometheus_can_fetch_the_figures_while_it_trains(node: Node) -> None:
    endpoint = PrometheusEndpoint(port=0)
    scrapes = Scrapes(endpoint)
    strategy = node()
    quiet_trainer(strategy=strategy, callbacks=[endpoint, scrapes]).fit(Tiny(), numbers())
    found = {name: values[""] for name, values in scrapes.found.items() if "" in values}
    assert found["gradientmail_steps_total"] == 8
    assert found["gradientmail_samples_total"] == 32
    assert found["gradientmail_learners"] == 1
    assert found["gradientmail_bytes_up_total"] > 0
    assert found.keys() >= {"gradientmail_round", "gradientmail_staleness_steps", "gradientmail_stall_seconds_total"}
    assert scrapes.found["gradientmail_requests_total"]["put"] > 0
    assert endpoint.port is None, "it serves for the time of the fit"


def test_an_endpoint_without_a_session_serves_nothing() -> None:
    endpoint = PrometheusEndpoint(port=0)
    quiet_trainer(callbacks=[endpoint]).fit(Tiny(), numbers())
    assert endpoint.port is None


def test_a_port_that_is_taken_is_said_and_a_failed_fit_gives_its_own_back(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot be served at 127.0.0.1:{port}"):
            quiet_trainer(strategy=node(), callbacks=[PrometheusEndpoint(port)]).fit(Tiny(), numbers())

    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    endpoint = PrometheusEndpoint(0)
    with pytest.raises(ZeroDivisionError):
        quiet_trainer(strategy=node("other"), callbacks=[endpoint, Fails()]).fit(Tiny(), numbers())
    assert endpoint.port is None


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"gradientmail-torch\[metrics\]"):
        PrometheusEndpoint()


# --- GradientMailCallback ------------------------------------------------------------------------------


def test_the_callback_does_for_any_strategy_what_ours_does(mailbox: Mailbox) -> None:
    part = GradientMailCallback(mailbox, ALGORITHM, "me", start_parties=1, done_parties=1, **QUICK)
    model, run = Tiny(), Tiny()
    quiet_trainer(callbacks=[part]).fit(model, numbers())
    align(run, mailbox=mailbox)
    assert digest(model) == digest(run)
    assert steps_in_run(mailbox) == 8
    assert part.stats is not None
    assert part.stats.samples == 32
    assert arrivals(mailbox) == ["barriers/done/me", "barriers/start/me"]


def test_others_take_place_and_name_from_the_callback(mailbox: Mailbox) -> None:
    part = GradientMailCallback(mailbox, ALGORITHM, "me", **QUICK)
    watch = Watches()
    quiet_trainer(callbacks=[part, EpochBarrier(1, poll_interval=0.05), AlignOnValidation(), watch]).fit(
        Tiny(), numbers(), numbers(shuffle=False)
    )
    assert arrivals(mailbox) == ["barriers/epoch-0/me"]
    assert watch.scored != watch.before


def test_a_callback_that_is_not_the_first_is_warned_of(mailbox: Mailbox, caplog: pytest.LogCaptureFixture) -> None:
    part = GradientMailCallback(mailbox, ALGORITHM, "me", **QUICK)
    quiet_trainer(callbacks=[Watches(), part]).fit(Tiny(), numbers())
    assert "GradientMailCallback is not the first callback" in caplog.text


def test_settings_of_the_callback_are_those_of_the_strategy() -> None:
    with pytest.raises(ConfigError, match="exchange_every must be at least 1"):
        GradientMailCallback("memory://x", exchange_every=0)
    with pytest.raises(TypeError, match="unknown_setting"):
        GradientMailCallback("memory://x", unknown_setting=1)  # type: ignore[call-arg]


# --- the progress bar ----------------------------------------------------------------------------------


def test_the_progress_bar_shows_the_runs_state(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    bar = GradientMailProgressBar()
    trainer = quiet_trainer(strategy=node(), max_epochs=2, enable_progress_bar=True, callbacks=[bar])
    trainer.fit(Tiny(), numbers())
    shown = capsys.readouterr()
    for figure in ("round=", "peers=1", "stale=", "stall="):
        assert figure in shown.out + shown.err


@pytest.mark.parametrize("shown", [True, False])
def test_a_bar_shows_the_bytes_of_joining_where_the_trainer_shows_one(
    node: Node, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(joinbar, "SHOWN_AFTER_S", 0.0)
    quiet_trainer(strategy=node(), enable_progress_bar=shown).fit(Tiny(), numbers())
    written = "".join(capsys.readouterr())
    assert ("Publishing parameters" in written) is shown
    assert ("Loading parameters" in written) is shown
    assert ("/76.0 [" in written) is shown, "19 numbers in fp32, in bytes"


def test_the_progress_bar_alone_is_lightnings(capsys: pytest.CaptureFixture[str]) -> None:
    quiet_trainer(enable_progress_bar=True, callbacks=[GradientMailProgressBar()]).fit(Tiny(), numbers())
    shown = capsys.readouterr()
    assert "Epoch 0: 100%" in shown.out + shown.err
    assert "round=" not in shown.out + shown.err
