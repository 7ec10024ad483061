"""One set of parameters for an evaluation on many nodes while training goes on."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradientmail_torch.algorithms.model_tensors import held_by, tensors_of
from gradientmail_torch.clock import SYSTEM_CLOCK, Clock
from gradientmail_torch.errors import RunMismatch
from gradientmail_torch.lightning.data import Lead, lead_ranks
from gradientmail_torch.lightning.parameters import part_of, reshard
from gradientmail_torch.mailbox import Mailbox, RetryingMailbox
from gradientmail_torch.patterns.synchronization import Invocation, SynchronizationNode
from gradientmail_torch.session.run import Run


@contextlib.contextmanager
def run_parameters(
    module: LightningModule,
    *,
    name: str,
    mailbox: Mailbox,
    learner_id: str,
    timeout: float | None = None,
    lease: float = 60.0,
    poll_interval: float = 1.0,
    outage_timeout: float = 600.0,
    lead: Lead | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[None]:
    """For the time of a ``with`` block, ``module`` has the run's committed parameters, the same on every node.

    Commits go on while nodes come here one after the other, so the first of them publishes what it has aligned to,
    once under ``name``, and all load that: one upload of the model, and a download for each node. The node's own
    parameters are put back at the end. Raises :class:`RunMismatch` when the mailbox holds no run, or that of another model.
    """
    own: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(prefix="gradientmail-") as folder, torch.no_grad():

        def publish(data: dict[str, Any], invocation: Invocation) -> BinaryIO:
            path = os.path.join(folder, "published")
            patient = RetryingMailbox(mailbox, patience_s=outage_timeout, clock=clock)
            save_file(_committed(patient, module), path)
            return open(path, "rb")

        def fetch() -> str:
            options: dict[str, Any] = {"lease": lease, "poll_interval": poll_interval, "outage_timeout": outage_timeout, "clock": clock}
            node = SynchronizationNode(name, ["first"], mailbox, learner_id, run_id="parameters", **options)
            node.call("first")
            path = os.path.join(folder, "fetched")
            node.wait(publish, timeout).value.save(path)  # type: ignore[attr-defined]
            return path

        try:
            committed = load_file((lead or lead_ranks)(fetch))
            own |= {part: tensor.detach().clone() for part, tensor in _tensors(module, committed).items()}
            _write(module, committed)
            if dist.is_initialized():
                dist.barrier()  # all ranks have read it before rank 0 removes it
            yield
        finally:
            _write(module, own)


def _committed(mailbox: Mailbox, module: LightningModule) -> dict[str, Tensor]:
    run = Run.open(mailbox)
    if run is None:
        raise RunMismatch(f"{mailbox!r} holds no run: mid-training evaluations need a GradientMail strategy or callback")
    tensors_of(module, run.layout)  # refuses another model
    found = {}
    for fragment, specs in enumerate(run.layout):
        _, values = run.newest(fragment)
        found.update({spec.name: value.contiguous() for spec, value in zip(specs, values, strict=True)})
    return found


def _write(module: LightningModule, values: dict[str, Tensor]) -> None:
    """Called on every rank: what is sharded takes its part from rank 0."""
    with torch.no_grad():
        for part, tensor in _tensors(module, values).items():
            value = values[part]
            tensor.copy_(value if isinstance(value, DTensor) else part_of(value.to(tensor.device), tensor))


def _tensors(module: LightningModule, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The module's tensors of the names in ``values``, trainable at the moment or not: the run's are those of its founder."""
    reshard(module)
    held = held_by(module)
    for name, value in values.items():
        if name not in held or held[name].shape != value.shape:
            raise RunMismatch(f"this model lacks the run's tensor {name!r}, or has it in another shape: evaluate the model that is trained")
    return {name: held[name] for name in values}
