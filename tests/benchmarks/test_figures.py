"""What is read from a race's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures
from benchmarks.report import table

PLAN = {"event": "plan", "at": 0.0, "method": "ours", "link": "unlimited", "scenario": "steady", "steps": 20, "seed": 0}


def _step(number: int, at: float, **more: Any) -> dict[str, Any]:
    return {"event": "step", "at": at, "step": number, "tokens": 1024, "loss": 4.0, "compute_s": 0.9, "optimizer_s": 0.1, "method_s": 0.0,
            "cpu_s": at, **more}  # fmt: skip


def _write(directory: Path, race: list[dict[str, Any]], *nodes: list[dict[str, Any]]) -> Path:
    for name, events in [("race", race), *((f"node-{number}", node) for number, node in enumerate(nodes))]:
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return directory


def _launches(*nodes: int, latecomer: bool = False) -> list[dict[str, Any]]:
    return [{"event": "launched", "at": 0.0, "node": node, "latecomer": latecomer} for node in nodes]


def test_a_rate_is_that_of_all_nodes_while_all_are_training(tmp_path: Path) -> None:
    nodes = [[_step(number, 10.0 + number) for number in range(20)], [_step(number, 12.0 + number) for number in range(20)]]
    found = figures.of(_write(tmp_path, [PLAN, *_launches(0, 1)], *nodes))
    assert found["tokens_per_s"] == 2048
    assert found["first_step_s"] == [10.0, 12.0]
    assert found["method_ms"]["p99"] == 0


def test_time_lost_is_what_a_plain_optimizer_step_would_not_take(tmp_path: Path) -> None:
    node = [_step(number, float(number), optimizer_s=2.1 if number % 5 == 0 else 0.1, method_s=0.5) for number in range(20)]
    found = figures.of(_write(tmp_path, [PLAN, *_launches(0)], node))
    assert found["method_ms"] == {"mean": 900.0, "p50": 500.0, "p99": 2500.0}


def test_a_line_that_a_kill_cut_off_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "node-0.jsonl").write_text('{"event": "start", "at": 1.0}\n{"event": "st')
    assert figures.read(tmp_path / "node-0.jsonl") == [{"event": "start", "at": 1.0}]


def test_requests_cost_what_the_store_takes_for_them(tmp_path: Path) -> None:
    node = [
        _step(
            number, 360.0 * number, requests={"put": 100 * number, "get": 1000 * number}, up=number * 10**6, down=0, stall_s=0.0, version=0
        )
        for number in range(20)
    ]
    found = figures.of(_write(tmp_path, [PLAN, *_launches(0)], node))
    assert found["requests_per_node_hour"] == {"put": 1000, "list": 0, "get": 10000, "delete": 0}
    assert found["dollars_per_node_hour"] == pytest.approx(0.009)
    assert found["up_mb_per_step"] == 1.0


def test_after_a_kill_the_survivor_s_longest_step_and_next_commit_are_told(tmp_path: Path) -> None:
    race = [PLAN | {"scenario": "kill"}, *_launches(0, 1), {"event": "killed", "at": 9.5, "node": 1}]
    survivor = [_step(number, float(number) if number < 12 else number + 3.0, version=number // 6) for number in range(20)]
    found = figures.of(_write(tmp_path, race, survivor, survivor[:10]))
    assert found["survivor_step_s"] == {"usual": 1.0, "longest_before": 1.0, "longest_after": 4.0}
    assert found["next_commit_s"] == 5.5


def test_the_arrival_of_a_latecomer_is_counted_from_its_launch(tmp_path: Path) -> None:
    late = {"event": "launched", "at": 10.0, "node": 1, "latecomer": True}
    first = [_step(number, float(number), version=0) for number in range(40)]
    second = [
        {"event": "start", "at": 10.1, "pid": 1},
        {"event": "joined", "at": 12.0, "bytes_down": 5_000_000},
        *(_step(number, 13.0 + number, merged=int(number > 7)) for number in range(20)),
    ]
    found = figures.of(_write(tmp_path, [PLAN | {"scenario": "join"}, *_launches(0), late], first, second))
    assert found["arrival"] == {"joined_s": 2.0, "step_s": 3.0, "joint_commit_s": 11.0, "joiner_down_mb": 5.0}


def test_a_cell_without_a_figure_is_a_dash() -> None:
    assert table(["a", "b"], [[1, None]]) == "| a | b |\n| --- | --- |\n| 1 | – |"
