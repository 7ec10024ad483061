"""What users may rely on: the public names, a quiet import, a complete wheel, and a README whose code runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradientmail_torch
from gradientmail_torch import callbacks

ROOT = Path(__file__).parent.parent


def test_the_package_offers_these_names() -> None:
    assert tuple(gradientmail_torch.__all__) == (
        "DecoupledDiLoCo",
        "DiLoCo",
        "GradientMailDDPStrategy",
        "GradientMailFSDP2Strategy",
        "GradientMailStrategy",
        "LocalSGD",
        "OuterSGD",
        "Session",
        "align",
        "open_mailbox",
    )
    for name in gradientmail_torch.__all__:
        assert getattr(gradientmail_torch, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Sesion"):
        _ = gradientmail_torch.Sesion


def test_every_callback_is_offered() -> None:
    assert all(hasattr(callbacks, name) for name in callbacks.__all__)


def run(code: str, **options: object) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, **options).stdout  # type: ignore[call-overload]


@pytest.mark.parametrize("module", ["gradientmail_torch", "gradientmail_torch.mailbox", "gradientmail_torch.patterns.barrier"])
def test_importing_what_needs_no_torch_imports_none(module: str) -> None:
    heavy = "{'torch', 'lightning', 'boto3'}"
    assert run(f"import sys, {module}; print(sorted({heavy} & sys.modules.keys()))").strip() == "[]"


def test_the_readme_has_two_commands_that_set_everything_up() -> None:
    assert "```bash\nmake demo\nmake test\n```" in (ROOT / "README.md").read_text()


def test_the_readme_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    script = "\n".join(blocks).replace("s3://my-bucket/run-1", str(tmp_path / "strategy-run"))
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
