"""Runs that a YAML describes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

from gradientmail_torch import DecoupledDiLoCo, GradientMailStrategy, LocalSGD
from gradientmail_torch.callbacks import AlignOnValidation, GradientMailCallback, RoundMonitor
from gradientmail_torch.lightning.__main__ import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
LAPTOP = CONFIGS / "laptop.yaml"
OVERLAYS = sorted(path.relative_to(CONFIGS) for folder in ("strategies", "callbacks") for path in (CONFIGS / folder).glob("*.yaml"))
COMPLETE = sorted(path.relative_to(CONFIGS) for path in CONFIGS.glob("*.yaml"))

# Lightning uses jsonargparse as it was some versions ago.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Starting from v1.9.0, `tensorboardX`")


@pytest.fixture(autouse=True)
def _no_arguments_of_pytests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["cli"])


def construct(*configs: Path) -> LightningCLI:
    """Everything that the YAMLs describe, constructed but not run."""
    return main([argument for path in configs for argument in ("--config", str(path))], run=False)


def dump(cli: LightningCLI) -> str:
    return cli.parser.dump(cli.config, skip_none=False)


@pytest.mark.parametrize("path", COMPLETE, ids=str)
def test_a_complete_yaml_constructs_a_trainer(path: Path) -> None:
    assert isinstance(construct(CONFIGS / path).trainer.strategy, GradientMailStrategy)


@pytest.mark.parametrize("path", OVERLAYS, ids=str)
def test_a_yaml_of_a_strategy_or_callback_goes_on_top_of_a_complete_one(path: Path, tmp_path: Path) -> None:
    """And what is dumped of it constructs the same again: an algorithm stays what it is."""
    first = construct(LAPTOP, CONFIGS / path)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(dump(first))
    again = construct(dumped)
    assert type(again.trainer.strategy) is type(first.trainer.strategy)
    assert [type(callback) for callback in again.trainer.callbacks] == [type(callback) for callback in first.trainer.callbacks]
    assert dump(again) == dump(first)


def test_every_strategy_and_callback_has_a_yaml() -> None:
    import gradientmail_torch.callbacks as callbacks
    import gradientmail_torch.lightning as strategies

    written = "\n".join(path.read_text() for path in CONFIGS.rglob("*.yaml"))
    for name in [*callbacks.__all__, *(name for name in strategies.__all__ if name.endswith("Strategy"))]:
        assert f".{name}\n" in written, f"no YAML in configs/ uses {name}"


def test_values_arrive_as_what_they_are() -> None:
    trainer = construct(LAPTOP).trainer
    part = trainer.strategy.participation
    assert part.algorithm == DecoupledDiLoCo(sync_every=20, fragments=2)
    assert (part.mailbox, part.poll_interval, part.lease) == ("out/laptop", 0.25, 6.0)
    assert {AlignOnValidation, RoundMonitor} <= {type(callback) for callback in trainer.callbacks}
    callback = construct(LAPTOP, CONFIGS / "callbacks" / "gradientmail.yaml").trainer.callbacks[0]
    assert isinstance(callback, GradientMailCallback)
    assert callback.participation.algorithm == LocalSGD(sync_every=100, parties=4)
    assert callback.participation.mailbox == "s3://bucket/run-1"


def test_a_registered_name_is_enough(tmp_path: Path) -> None:
    config = tmp_path / "named.yaml"
    config.write_text(
        "seed_everything: 1\nmodel: charlm.CharGPT\ndata: charlm.TextData\ntrainer:\n  accelerator: cpu\n  strategy: gradientmail\n"
    )
    assert isinstance(construct(config).trainer.strategy, GradientMailStrategy)


@pytest.mark.timeout(300)
def test_the_laptop_run_works_from_end_to_end(tmp_path: Path, environment: dict[str, str]) -> None:
    """As in its first lines, with fewer steps and a smaller model."""
    smaller = ["--trainer.max_steps=6", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=2", "--model.width=16"]
    smaller += ["--trainer.strategy.algorithm.sync_every=2", "--trainer.strategy.poll_interval=0.05"]
    command = [sys.executable, str(ROOT / "examples" / "cli.py"), "fit", "--config", str(LAPTOP), *smaller]
    node = {**environment, "GRADIENTMAIL_LEARNER_ID": "node-0"}
    done = subprocess.run(
        command, env=node, cwd=tmp_path, timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert (tmp_path / "out" / "laptop" / "learners" / "node-0").is_dir()
    (metrics,) = (tmp_path / "out" / "laptop-logs").rglob("metrics.csv")
    assert "gradientmail/round" in metrics.read_text()


@pytest.mark.timeout(300)
def test_the_module_runs_as_a_command(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "gradientmail_torch.lightning", "fit", "--help"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=280, stdout=subprocess.PIPE, text=True, check=True)
    assert "--trainer.strategy" in done.stdout
