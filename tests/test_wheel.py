"""What an installed wheel holds and can do, without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that the sdist builds."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs; its dependencies are those of this Python."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def run(installed: Path, *command: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout


def test_it_is_complete(wheel: Path, installed: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"gradientmail_torch"}
    assert "gradientmail_torch/callbacks/__init__.py" in names
    assert "gradientmail_torch/py.typed" in names
    assert str(installed) in run(installed, "-c", "import gradientmail_torch.callbacks as c; print(c.__file__)", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_runs_from_it(installed: Path, tmp_path: Path) -> None:
    """Small, and to its end: one node is killed and comes back, all agree, and the commands that it names work."""
    (tmp_path / "text").write_text("All that glitters is not gold. " * 300)
    command = str(installed / "bin" / "gradientmail")
    shown = run(installed, command, "demo", "--steps", "40", "--text", "text", cwd=tmp_path)
    assert "gets SIGKILL" in shown
    assert "All nodes report the same loss: True" in shown
    started = json.loads((tmp_path / "out/demo/node-0.jsonl").read_text().splitlines()[0])
    assert Path(started["program"]).is_relative_to(installed)
    told = [line.split("gradientmail ", 1)[1] for line in shown.splitlines() if line.startswith("  ") and "gradientmail " in line]
    assert [line.split()[0] for line in told] == ["report", "export"]
    for line in told:
        run(installed, command, *line.replace("'", "").split(), cwd=tmp_path)
    assert (tmp_path / "out/demo/report.html").exists()
    assert (tmp_path / "out/demo/model.safetensors").exists()


def test_the_demo_removes_nothing_but_its_own(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(AssertionError, match="no example's"):
        run(installed, str(installed / "bin" / "gradientmail"), "demo", "--out", ".", cwd=tmp_path)
    assert (tmp_path / "precious").exists()
