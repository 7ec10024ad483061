"""What is compared: ours in several settings, and what a user would take instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "torchft": (TORCH, "numpy", "torchft-nightly==2026.10.26"),
    "hivemind": (TORCH, "numpy", "hivemind==1.1.12"),
}
"""Peers that need an environment of their own, with what is installed there."""

Meeting = Literal["nothing", "store", "lighthouse", "file", "mailbox"]


@dataclass(frozen=True, kw_only=True)
class Method:
    title: str
    program: str
    """A module of :mod:`benchmarks.nodes`."""
    environment: str = ""
    """A key of :data:`ENVIRONMENTS`; this one's unless given."""
    meeting: Meeting = "nothing"
    """What the nodes find each other by."""
    nodes: int = 2
    elastic: bool = False
    """Whether nodes may come and go, so that it is worth trying."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return ROOT / f".venv-{self.environment}" / "bin" / "python" if self.environment else Path(sys.executable)

    def missing(self) -> str:
        """Why it cannot run here; empty when it can."""
        if not self.environment:
            return ""
        if not self.python.exists():
            return f"no environment .venv-{self.environment}: python -m benchmarks environments"
        package = self.environment
        done = subprocess.run([self.python, "-c", f"import {package}"], capture_output=True, text=True, cwd="/", check=False)
        return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def _ours(title: str, *, nodes: int = 2, **settings: Any) -> Method:
    return Method(title=title, program="ours", meeting="mailbox", nodes=nodes, elastic=True, settings=settings)


BEST: Mapping[str, Any] = {
    "fragments": 4,
    "adoption": "overwrite",
    "outer": {"lr": 0.7},
    "wire": "int4",
    "commit_wire": "int4",
}
"""What won in the tables of settings."""
DILOCO_OUTER = {"lr": 0.7, "momentum": 0.9}
PEERS_OUTER = {**DILOCO_OUTER, "warmup": False}

METHODS: Mapping[str, Method] = {
    "alone": Method(title="one process", program="alone", nodes=1),
    "bound": Method(title="no communication (bound)", program="alone"),
    "ddp": Method(title="DDP, gloo", program="ddp", meeting="store"),
    "postlocal": Method(
        title="torch post-local SGD, 40 DDP steps first", program="ddp", meeting="store", settings={"post_local": True, "warm_up_steps": 40}
    ),
    "torchft": Method(title="torchft DiLoCo, 0.7/0.9", program="torchft_diloco", environment="torchft", meeting="lighthouse", elastic=True),
    "hivemind": Method(title="hivemind, local updates", program="hivemind_local", environment="hivemind", meeting="file", elastic=True),
    "ours": _ours("gradientmail"),
    "ours-0.7/0.9": _ours("gradientmail, outer as torchft's", outer=PEERS_OUTER),
    "ours-0.7/0.9-overwrite": _ours("gradientmail, outer step and overwriting as torchft's", outer=PEERS_OUTER, adoption="overwrite"),
    "ours-0.7/0.9-warmup": _ours("gradientmail, 0.7/0.9 with warm-up, overwriting", outer=DILOCO_OUTER, adoption="overwrite"),
    "ours-int4": _ours("gradientmail, int4 both ways", wire="int4", commit_wire="int4"),
    "ours-best": _ours(
        "gradientmail, best settings: 4 fragments, int4, overwriting, outer lr 0.7",
        **BEST,
    ),
    "bound-4": Method(title="no communication (bound), 4 nodes", program="alone", nodes=4),
    "ours-4": _ours("gradientmail, 4 nodes", nodes=4),
}


def make_environments(names: list[str]) -> None:
    """Create the environments of the peers; one that does not install is said, and left out of the races."""
    for name in names or [*ENVIRONMENTS]:
        where = ROOT / f".venv-{name}"
        subprocess.run([sys.executable, "-m", "venv", where], check=True)
        done = subprocess.run([where / "bin" / "python", "-m", "pip", "install", "--quiet", *ENVIRONMENTS[name]], check=False)
        print(f"{name}: {'installed' if done.returncode == 0 else 'does not install here'}")
