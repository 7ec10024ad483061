"""How much host memory taking part costs, in models of fp32: two processes that train a model of made-up steps.

``python -m benchmarks micro memory`` measures it with an allocator that gives back what is freed, as where a GPU trains, and without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

MILLIONS, TENSORS = 100, 48
CYCLES, SYNC_EVERY, STEP_S = 4, 20, 0.5


def measure() -> dict[str, Any]:
    found: dict[str, Any] = {"parameters_millions": MILLIONS}
    for fragments in (6, 24):
        for allocator in ("plain", "gives back"):
            found[f"{fragments} fragments, {allocator}"] = _two_nodes(fragments, allocator)
    return found


def _two_nodes(fragments: int, allocator: str) -> dict[str, float]:
    """The larger figures of both."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "benchmarks.host_memory", directory, str(fragments), allocator]
        root = Path(__file__).parents[1]
        started = [subprocess.Popen([*command, f"node-{i}"], stdout=subprocess.PIPE, cwd=root) for i in range(2)]
        nodes = [json.loads(process.communicate()[0]) for process in started]
    return {figure: max(node[figure] for node in nodes) for figure in nodes[0]}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows = MILLIONS * 10**6 // TENSORS // 1024
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(rows, 1024) * 0.02) for _ in range(TENSORS))


def _train(mailbox: str, fragments: str, allocator: str, name: str) -> None:
    """Print the memory beside the model, in models: usually (the median over steps) and at most."""
    from gradientmail_torch import DecoupledDiLoCo, Session
    from gradientmail_torch.session.freed_memory import give_back_freed

    torch.set_num_threads(1)
    if allocator == "gives back":
        give_back_freed()
    model = _Model()
    bytes_of_model = sum(4 * parameter.numel() for parameter in model.parameters())
    before, held = _memory("VmRSS"), []
    session = Session(model, mailbox=mailbox, learner_id=name, algorithm=DecoupledDiLoCo(sync_every=SYNC_EVERY, fragments=int(fragments)))
    with session:
        for _ in range(CYCLES * SYNC_EVERY):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9999)
            time.sleep(STEP_S)
            session.step(samples=4)
            held.append(_memory("VmRSS") - before)
        merged = session.stats().tally.merged
    held.sort()
    figures = {"usually": held[len(held) // 2], "at_most": _memory("VmHWM") - before}
    print(json.dumps({figure: round(value / bytes_of_model, 2) for figure, value in figures.items()} | {"contributions": merged}))


def _memory(field: str) -> int:
    """Bytes of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    _train(*sys.argv[1:])
