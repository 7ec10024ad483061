"""Runs that a YAML describes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from tiny import parameters

from gradientmail_torch import DecoupledDiLoCo, GradientMailDDPStrategy, GradientMailStrategy, LocalSGD, open_mailbox
from gradientmail_torch.callbacks import AlignOnValidation, GradientMailCallback, RoundMonitor
from gradientmail_torch.cli.export import export
from gradientmail_torch.cli.run_view import read_run
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


ON_CPU = ["--trainer.accelerator=cpu"]
SMALL = [f"--trainer.{setting}" for setting in ("max_steps=4", "max_epochs=1", "accumulate_grad_batches=1", "num_sanity_val_steps=0")]
SMALL += ["--trainer.limit_val_batches=1", "--model.width=16", "--model.layers=1", "--model.heads=2"]
SMALL += ["--data.batch_size=4", "--trainer.enable_model_summary=false"]


def alone(mailbox: object) -> list[str]:
    """Settings of a strategy for a node that waits for nobody."""
    given = (f"mailbox={mailbox}", "algorithm.sync_every=2", "start_parties=null", "done_parties=null", "poll_interval=0.05", "lease=3")
    return [f"--trainer.strategy.{setting}" for setting in given]


def construct(*configs: Path, also: Sequence[str] = ()) -> LightningCLI:
    """Everything that the YAMLs describe, constructed but not run."""
    return main([*(argument for path in configs for argument in ("--config", str(path))), *also], run=False)


def dump(cli: LightningCLI) -> str:
    return cli.parser.dump(cli.config, skip_none=False)


@pytest.mark.parametrize("path", COMPLETE, ids=str)
def test_a_complete_yaml_constructs_what_it_says(path: Path) -> None:
    """Model, data, callbacks and strategy; where it asks for GPUs, but for those. Its mailbox is one that can be opened."""
    cli = construct(CONFIGS / path, also=ON_CPU)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, GradientMailDDPStrategy if path.stem == "gpus_in_a_node" else GradientMailStrategy)
    part = strategy.participation
    if part.mailbox is not None:
        assert open_mailbox(part.mailbox, probed=False)
    else:
        assert "GRADIENTMAIL_MAILBOX=" in (CONFIGS / path).read_text()
    assert "GRADIENTMAIL_LEARNER_ID=" in (CONFIGS / path).read_text()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [path for path in COMPLETE if path.stem != "gpus_in_a_node"], ids=str)
def test_a_complete_yaml_trains(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Four steps of a smaller model on a CPU, alone, with a directory as the mailbox."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIENTMAIL_LEARNER_ID", "node-0")
    trainer = main(["fit", "--config", str(CONFIGS / path), *ON_CPU, *SMALL, *alone(tmp_path / "run")]).trainer
    assert trainer.global_step == 4
    commits = [commit for commit in read_run(open_mailbox(tmp_path / "run"), history=True).commits if commit.merged]
    assert commits


@pytest.mark.s3
@pytest.mark.timeout(300)
def test_a_run_on_an_s3_server_of_ones_own(s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIENTMAIL_LEARNER_ID", "node-0")
    main(["fit", "--config", str(CONFIGS / "minio.yaml"), *ON_CPU, *SMALL, *alone(s3_url)])
    assert read_run(open_mailbox(s3_url)).fragments[0].version > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_processes_of_a_node(tmp_path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "examples" / "cli.py")]
    command += ["fit", "--config", str(CONFIGS / "gpus_in_a_node.yaml"), *ON_CPU, *SMALL, *alone(tmp_path / "run"), "--trainer.devices=2"]
    node = {**environment, "GRADIENTMAIL_LEARNER_ID": "node-0"}
    done = subprocess.run(
        command, env=node, cwd=tmp_path, timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (life,) = read_run(open_mailbox(tmp_path / "run")).learners
    assert life.beat is not None
    assert life.beat.samples == 2 * 4 * 4  # both processes' batches of four


def test_of_an_adapted_model_only_the_adapters_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuned on what a run before it has left; with a checkpoint of a node the whole model comes out."""
    from charlm import CharGPT
    from lora import ADAPTED, AdaptedGPT
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRADIENTMAIL_LEARNER_ID", "node-0")
    base = CharGPT(width=16, layers=1, heads=2)
    save_file(base.state_dict(), "base.safetensors")
    given = ["--model.base=base.safetensors", *ON_CPU, *SMALL, *alone(tmp_path / "run"), "--trainer.val_check_interval=4"]
    tuned = main(["fit", "--config", str(CONFIGS / "lora.yaml"), *given]).model
    view = read_run(open_mailbox(tmp_path / "run"))
    sent = {spec.name for specs in view.manifest.layout for spec in specs}
    assert sent == {name for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    assert len(sent) == 2 * len(ADAPTED) * len(base.blocks)
    (template,) = (tmp_path / "out" / "lora-checkpoints").glob("*.ckpt")
    export(open_mailbox(tmp_path / "run"), tmp_path / "whole.ckpt", template=template)
    whole = AdaptedGPT.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert parameters(whole).keys() == parameters(tuned).keys()
    for name, value in parameters(tuned).items():
        assert torch.equal(parameters(whole)[name], value), name  # the strategy has loaded the run's parameters at the end
    assert torch.equal(whole.blocks[0].up.base.weight, base.blocks[0].up.weight)


def test_presets_in_yaml_are_those_in_python() -> None:
    assert construct(CONFIGS / "pretrain.yaml", also=ON_CPU).trainer.strategy.participation.algorithm == DecoupledDiLoCo.pretrain()
    assert construct(CONFIGS / "lora.yaml", also=ON_CPU).trainer.strategy.participation.algorithm == DecoupledDiLoCo.finetune()


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
