"""Two ranks of one node, with DDP and FSDP2: rank 0 alone talks to the mailbox, and both end with the run's parameters.

All scenarios of ``scripts/ranks.py`` run in one launch of torchrun, once.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, digest, numbers

from gradientmail_torch import align

Reports = Callable[[str], list[dict[str, Any]]]
RunOf = Callable[..., str]
SCRIPT = Path(__file__).parent / "scripts" / "ranks.py"

either = pytest.mark.parametrize("kind", ["ddp", "fsdp2"])


pytestmark = pytest.mark.timeout(300)  # the first test waits for all scenarios, on whatever machine


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), str(directory)]
    done = subprocess.run(command, env=environment, timeout=280, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return directory, done.stdout


@pytest.fixture
def reports(launched: tuple[Path, str]) -> Reports:
    """What both ranks wrote down in a scenario."""
    directory, output = launched

    def read(scenario: str) -> list[dict[str, Any]]:
        files = [directory / f"{scenario}-{rank}.json" for rank in (0, 1)]
        assert all(file.exists() for file in files), f"{scenario} did not end well:\n{output[-6000:]}"
        return [json.loads(file.read_text()) for file in files]

    return read


@pytest.fixture
def run_of(launched: tuple[Path, str]) -> Callable[[str], str]:
    """Digest of the parameters that the run of a scenario ended with."""

    def read(scenario: str, dtype: torch.dtype = torch.float32) -> str:
        model = Tiny().to(dtype)
        align(model, mailbox=launched[0] / scenario)
        return digest(model)

    return read


def same(reports: list[dict[str, Any]], *keys: str) -> bool:
    return all(report[key] == reports[0][key] for report in reports for key in keys)


@either
def test_both_ranks_end_with_the_runs_parameters_and_share_the_samples(reports: Reports, run_of: RunOf, kind: str) -> None:
    zero, one = both = reports(f"{kind}_plain")
    assert same(both, "first", "final")
    assert zero["final"] == run_of(f"{kind}_plain")
    assert (zero["rank"], one["rank"]) == (0, 1)
    assert sorted(zero["seen"] + one["seen"]) == list(range(32))
    assert (zero["steps"], zero["samples"]) == (4, 32)
    assert one["steps"] is None


@either
def test_accumulated_clipped_and_exchanged_seldom(reports: Reports, kind: str) -> None:
    zero, _ = both = reports(f"{kind}_accumulated_clipped_and_seldom")
    assert same(both, "first", "final")
    assert (zero["steps"], zero["samples"]) == (8, 128)


@either
@pytest.mark.parametrize(("scenario", "dtype"), [("beside_another", torch.float32), ("in_bf16", torch.bfloat16)])
def test_what_another_node_does_reaches_both_ranks(reports: Reports, run_of: RunOf, kind: str, scenario: str, dtype: torch.dtype) -> None:
    zero, one = both = reports(f"{kind}_{scenario}")
    assert same(both, "first", "final")
    assert zero["final"] == run_of(f"{kind}_{scenario}", dtype)
    assert zero["first"] != zero["final"]
    assert zero["steps"] == 16
    assert one["steps"] is None


@either
def test_synchronous_algorithms_train_too(reports: Reports, kind: str) -> None:
    zero, _ = both = reports(f"{kind}_synchronous")
    assert same(both, "first", "final")
    assert zero["steps"] == 4


@either
def test_validations_score_the_runs_parameters_and_local_ones_are_put_back(reports: Reports, kind: str) -> None:
    both = reports(f"{kind}_callbacks")
    assert same(both, "final", "validations", "barriers")
    for before, _, after in both[0]["validations"]:
        assert before == after
    assert any(before != scored for before, scored, _ in both[0]["validations"])
    assert both[0]["barriers"] == ["d", "epoch-0", "epoch-1", "s"]


@either
def test_local_parameters_are_put_back_also_after_an_exception(reports: Reports, kind: str) -> None:
    both = reports(f"{kind}_failing_validation")
    assert same(both, "seen")
    before, scored, after = both[0]["seen"]
    assert before == after
    assert before != scored


@either
def test_both_ranks_score_the_runs_parameters_together(reports: Reports, launched: tuple[Path, str], kind: str) -> None:
    zero, _ = both = reports(f"{kind}_evaluated")
    assert same(both, "scored", "put back", "end", "final")
    assert zero["put back"] == [True, True]
    model = Tiny()
    align(model, mailbox=launched[0] / f"{kind}_evaluated")
    with torch.no_grad():
        losses = [float(model.loss(batch)) for batch in numbers(shuffle=False)]
    assert zero["end"] == {"val_loss": pytest.approx(sum(losses) / len(losses))}


@either
def test_resuming_takes_the_runs_parameters_on_both_ranks(reports: Reports, kind: str) -> None:
    zero, _ = both = reports(f"{kind}_resumed")
    assert same(both, "first", "final", "run")
    assert zero["first"] == zero["run"]
    assert zero["steps"] == 4


@either
def test_a_mailbox_that_cannot_be_opened_is_refused_on_both_ranks(reports: Reports, kind: str) -> None:
    zero, one = reports(f"{kind}_refused")
    assert zero["error"] == one["error"] == "ConfigError"
    assert "unknown scheme 'ftp'" in one["text"]
    assert "(on rank 0 of this node)" in one["text"]


@either
@pytest.mark.parametrize("told", ["0", "1"])
def test_sigterm_to_one_rank_ends_both_with_143_and_all_steps_in_the_run(reports: Reports, kind: str, told: str) -> None:
    zero, one = (report[told] for report in reports(f"{kind}_told_to_stop"))
    assert zero["code"] == one["code"] == 143
    assert zero["steps"] == zero["merged"] == 4


def test_sigterm_to_a_rank_that_waits_for_one_that_waits_is_heard(reports: Reports) -> None:
    zero, one = reports("told_to_stop_at_a_barrier")
    assert zero["code"] == one["code"] == 143


def test_a_made_up_name_and_its_seed_are_the_same_on_all_ranks(reports: Reports) -> None:
    zero, one = both = reports("made_up_name")
    assert same(both, "learner_id", "seed", "final")
    assert sorted(zero["seen"] + one["seen"]) == list(range(32))


def test_several_optimizers_stepped_by_hand_make_one_step_a_batch(reports: Reports) -> None:
    zero, _ = both = reports("by_hand")
    assert same(both, "final")
    assert (zero["steps"], zero["samples"]) == (4, 32)


def test_a_compiled_model_trains(reports: Reports) -> None:
    both = reports("compiled")
    assert same(both, "first", "final")
    assert both[0]["steps"] == 4


def test_lightnings_own_strategy_with_callbacks_for_everything(reports: Reports) -> None:
    zero, _ = both = reports("plain_strategy")
    assert same(both, "first", "final")
    assert (zero["steps"], zero["samples"]) == (4, 32)


def test_barriers_work_without_a_run(reports: Reports) -> None:
    both = reports("plain_strategy_without_a_run")
    assert same(both, "first", "final", "barriers")
    assert both[0]["barriers"] == ["done", "epoch-0", "start"]
