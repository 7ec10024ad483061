"""Loops without the Trainer: two processes each, and the same model in both at the end."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

BARRIER_DOCUMENT = """
barrier = Barrier(mailbox=box, learner_id=f"node-{rank}")

session = Session(model, algorithm=algorithm, mailbox=box, learner_id=f"node-{rank}")
barrier.wait("start", parties=nodes)

with session:
    for batch in dataloader:
        loss = train_step(model, optimizer, batch)
        session.step(samples=len(batch))

barrier.wait("done", parties=nodes, timeout=600)
align(model, mailbox=box)
evaluate(model)
"""

STARTS = """
import sys
from pathlib import Path
from several import start_nodes
sys.exit(start_nodes(Path("node.py"), 1, "."))
"""
WITH_EXAMPLES = {**os.environ, "PYTHONPATH": str(EXAMPLES)}


def run(script: str, tmp_path: Path, mailbox: str) -> list[str]:
    """The lines that the nodes of an example print."""
    command = [sys.executable, str(EXAMPLES / script), "--mailbox", mailbox]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return sorted(line for line in ended.stdout.splitlines() if line.startswith("node-"))


@pytest.mark.slow
@pytest.mark.timeout(220)
@pytest.mark.parametrize("mailbox_url", ["file", pytest.param("s3", marks=pytest.mark.s3)], indirect=True)
def test_a_plain_loop_ends_with_one_model_on_both_nodes(tmp_path: Path, mailbox_url: str) -> None:
    first, second = run("plain_loop.py", tmp_path, mailbox_url)
    assert first.removeprefix("node-0") == second.removeprefix("node-1")
    accuracy = re.search(r"accuracy of the run ([0-9.]+)", first)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.8


@pytest.mark.slow
@pytest.mark.timeout(220)
def test_a_fabric_loop_ends_with_one_model_on_both_nodes(tmp_path: Path) -> None:
    first, second = run("fabric_loop.py", tmp_path, str(tmp_path / "mailbox"))
    assert first.removeprefix("node-0") == second.removeprefix("node-1")
    loss = re.search(r"loss of the run ([0-9.]+)", first)
    assert loss is not None
    assert float(loss[1]) < 0.5


def test_a_loop_that_is_started_again_is_another_run_and_removes_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    (tmp_path / "node.py").touch()  # a node that does nothing
    mailboxes = [
        subprocess.run([sys.executable, "-c", STARTS], cwd=tmp_path, env=WITH_EXAMPLES, check=True, capture_output=True).stdout
        for _ in range(2)
    ]
    assert len({*mailboxes}) == 2
    assert (tmp_path / "precious").exists()


def test_the_plain_loop_is_the_program_of_the_barrier_document() -> None:
    assert (EXAMPLES / "plain_loop.py").read_text().endswith(BARRIER_DOCUMENT)


@pytest.mark.parametrize("script", ["plain_loop.py", "fabric_loop.py", "transformers_callback.py"])
def test_each_says_how_it_is_started(script: str) -> None:
    said = ast.get_docstring(ast.parse((EXAMPLES / script).read_text())) or ""
    assert f"python examples/{script} --mailbox s3://bucket/run-1 --rank 0 --nodes 2" in said


def test_the_callback_for_transformers_imports_it_where_it_is_used() -> None:
    top = ast.parse((EXAMPLES / "transformers_callback.py").read_text()).body
    imported = {alias.name for node in top if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("transformers") for name in imported)
