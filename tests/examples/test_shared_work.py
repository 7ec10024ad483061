"""The examples of shared work run from one command each, with one node killed, and their totals are right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI

ROOT = Path(__file__).parents[2]


def run(example: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "examples" / example, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_elastic_data_trains_on_every_shard() -> None:
    output = run("elastic_data.py")
    assert "node-2 killed with SIGKILL" in output
    assert "12 of 12 shards done, 0 given up" in output
    assert re.findall(r"^ +(\d+)  node-\d", output, re.MULTILINE) == [str(shard) for shard in range(12)]
    assert "taken over" in output


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_distributed_evaluation_gives_the_numbers_of_one_process() -> None:
    output = run("distributed_evaluation.py")
    assert "node-2 killed with SIGKILL" in output
    assert "24 of 24 pieces scored" in output
    lines = [line.split(maxsplit=1)[1] for line in output.splitlines() if re.match(r"node-\d +accuracy", line)]
    assert len(lines) == 2
    assert f"one process  {lines[0]}" in output
    assert output.endswith("the same numbers everywhere, to the last bit\n")


@pytest.mark.filterwarnings("ignore")  # what Lightning and jsonargparse say of each other
def test_the_yaml_of_elastic_data_is_what_the_classes_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cli.py", "--config", str(ROOT / "configs" / "elastic_data.yaml")])
    cli = LightningCLI(run=False, save_config_callback=None)
    assert type(cli.datamodule).__name__ == "TextShards"
    assert cli.trainer.strategy.participation.done_parties == 2
    assert "DistributedEvaluation" in [type(callback).__name__ for callback in cli.trainer.callbacks]
