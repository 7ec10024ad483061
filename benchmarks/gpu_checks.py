"""What holds on a CUDA device: snapshots beside the training stream, pinned memory, no stall, adoption on the device.

``python -m benchmarks gpu`` says why nothing is checked where there is none.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradientmail_torch.algorithms.layout import split
from gradientmail_torch.algorithms.model_tensors import describe
from gradientmail_torch.session.parameters import LocalParameters

WIDTH, LAYERS, FRAGMENTS = 2048, 20, 24
"""About a billion parameters."""


def run() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"skipped": "no CUDA device (torch.cuda.is_available() is False)"}
    model = _model().to("cuda", torch.bfloat16)
    layout = split(describe(model), FRAGMENTS)
    access = LocalParameters(model, layout)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "fragments": len(layout),
    }
    for check in (snapshot_is_of_its_moment, staged_is_pinned, adoption, stall):
        found[check.__name__] = check(model, access)
    found["ddp_with_one_process"] = ddp_with_one_process("gpu")
    return found


def _model() -> nn.Module:
    """Linear layers of a transformer's shapes: what is checked is the moving of parameters."""

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH),
                             nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))  # fmt: skip

    return nn.Sequential(*(block() for _ in range(LAYERS)))


def snapshot_is_of_its_moment(model: nn.Module, access: LocalParameters) -> dict[str, Any]:
    """A snapshot holds the values of when it was taken, though the training stream overwrites them at once."""
    parameters = [*model.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(1.0)
        torch.cuda.synchronize()
        began = time.perf_counter()
        waits = [access.snapshot(fragment) for fragment in range(FRAGMENTS)]
        for parameter in parameters:
            parameter.fill_(2.0)
        taken = time.perf_counter() - began
        values = [tensor for wait in waits for tensor in wait()]
    torch.cuda.synchronize()
    good = all(bool((tensor == 1.0).all()) for tensor in values)
    return {"holds": good, "host_ms_per_fragment": round(1000 * taken / FRAGMENTS, 3)}


def staged_is_pinned(model: nn.Module, access: LocalParameters) -> dict[str, Any]:
    """What the background prepares for the training thread lies in pinned memory."""
    tensors = access.staged([torch.ones(1 << 20)])
    return {"holds": all(tensor.is_pinned() for tensor in tensors)}


def adoption(model: nn.Module, access: LocalParameters) -> dict[str, Any]:
    """A correction is added on the device, and the answer says what a bf16 parameter really moved by."""
    before = [parameter.detach().float().cpu() for parameter in model.parameters()]
    corrections = _corrections(access)
    torch.cuda.synchronize()
    began = time.perf_counter()
    moved = [access.shift(fragment, of_fragment) for fragment, of_fragment in enumerate(corrections)]
    torch.cuda.synchronize()
    taken = time.perf_counter() - began
    after = [parameter.detach().float().cpu() for parameter in model.parameters()]
    expected = sum(float((b - a).double().sum()) for a, b in zip(before, after, strict=True))
    said = sum(float(tensor.double().sum()) for fragment in moved for tensor in fragment if tensor is not None)
    return {"holds": abs(expected - said) <= 1e-6 * abs(expected), "ms_per_fragment": round(1000 * taken / FRAGMENTS, 2)}


def stall(model: nn.Module, access: LocalParameters) -> dict[str, Any]:
    """Steps with a snapshot and an adoption of a fragment in each, against steps without."""
    windows = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    corrections = _corrections(access)

    def step() -> None:
        model(windows).square().mean().backward()
        model.zero_grad(set_to_none=True)

    plain = _seconds(lambda fragment: step())

    def synchronised(fragment: int) -> None:
        step()
        access.snapshot(fragment)
        access.shift(fragment, corrections[fragment])

    beside = _seconds(synchronised)
    return {
        "step_ms": round(1000 * plain, 2),
        "step_with_one_fragment_ms": round(1000 * beside, 2),
        "stall_ms": round(1000 * (beside - plain), 2),
    }


def ddp_with_one_process(accelerator: str) -> dict[str, Any]:
    """A node of one process under DDP trains through a mailbox, and ends with the run's parameters."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from benchmarks.step_overhead import Small
    from gradientmail_torch import DecoupledDiLoCo, GradientMailDDPStrategy, align

    module, loader = Small(), DataLoader(TensorDataset(torch.randn(256, 32)), batch_size=8)
    with tempfile.TemporaryDirectory() as mailbox:
        strategy = GradientMailDDPStrategy(mailbox, learner_id="node-0", algorithm=DecoupledDiLoCo(sync_every=5))
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        Trainer(accelerator=accelerator, devices=1, strategy=strategy, max_steps=30, **quiet).fit(module, loader)
        run = Small()
        versions = align(run, mailbox=mailbox)
    same = all(torch.equal(mine.detach().cpu(), theirs) for mine, theirs in zip(module.parameters(), run.parameters(), strict=True))
    return {"holds": same and min(versions) > 1, "commits": min(versions), "backend": torch.distributed.get_backend()}


def _seconds(step: Callable[[int], None], rounds: int = 3) -> float:
    for fragment in range(3):
        step(fragment)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        for fragment in range(FRAGMENTS):
            step(fragment)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / (rounds * FRAGMENTS)


def _corrections(access: LocalParameters) -> list[list[Tensor]]:
    return [access.staged([torch.full(spec.shape, 2.0**-7) for spec in specs]) for specs in access._layout]
