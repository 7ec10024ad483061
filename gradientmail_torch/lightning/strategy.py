"""Lightning strategies for training through a mailbox.

Each is one of Lightning's own strategies, which goes on doing what it does inside the node, and one mixin, which
takes part in the run between the nodes. ``barrier``, ``broadcast``, ``reduce`` and ``all_gather`` stay Lightning's
and local to the node: nothing that Lightning decides per batch ever waits for the mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.strategies.strategy import Strategy

from gradientmail_torch.algorithms import Algorithm, DecoupledDiLoCo
from gradientmail_torch.errors import ConfigError
from gradientmail_torch.lightning.companion import Companion, companion_of
from gradientmail_torch.lightning.group import Group, end_with_the_process
from gradientmail_torch.lightning.launch import check_launch
from gradientmail_torch.lightning.participation import MailboxLike, Participation
from gradientmail_torch.lightning.seeding import learner_seed
from gradientmail_torch.session import Stats

_ARGUMENTS = """
    Args:
        mailbox: URL of the run's mailbox (``s3://bucket/run``, a directory), or a Mailbox; from the environment
            variable ``GRADIENTMAIL_MAILBOX`` when left out.
        learner_id: this node's name in the run; from ``GRADIENTMAIL_LEARNER_ID``, or made up, when left out.
            A node that comes back under its name goes on at once.
        algorithm: :class:`DecoupledDiLoCo` with its defaults when left out.
        start_parties: nodes that must have joined before training begins; none are waited for when left out.
        done_parties: nodes that must have finished before the run's parameters are loaded at the end of fit.
        start_timeout, done_timeout: seconds to wait for them. Without the last ones it goes on after the second.
        align: load the run's parameters at the end of fit, so that ``trainer.test`` scores them.
        reseed: give each node random numbers of its own after the run's initial parameters are loaded.
        exchange_every: optimizer steps between two exchanges of a node's ranks with its session.
        batch_size: how many samples a batch holds, where that cannot be told from its tensors.
        lease, poll_interval, outage_timeout, keep, keep_seconds: see :class:`~gradientmail_torch.session.Settings`.
        close_timeout, leave_timeout: seconds to publish what is left, at the end and after an exception.
"""


class _MailboxMixin(Strategy):
    """What all three strategies do around their base: insert the companion, check the launch, seed samplers."""

    _single_device = False

    def __init__(
        self,
        mailbox: MailboxLike | None = None,
        algorithm: Algorithm | None = None,
        learner_id: str | None = None,
        start_parties: int | None = None,
        done_parties: int | None = None,
        start_timeout: float | None = None,
        done_timeout: float | None = 600.0,
        align: bool = True,
        reseed: bool = True,
        exchange_every: int = 1,
        batch_size: Callable[[Any], int] | None = None,
        lease: float = 30.0,
        poll_interval: float | None = None,
        outage_timeout: float = 600.0,
        step_timeout: float = 600.0,
        keep: int | None = 4,
        keep_seconds: float = 60.0,
        close_timeout: float = 600.0,
        leave_timeout: float = 10.0,
        **strategy_arguments: Any,
    ) -> None:
        super().__init__(**strategy_arguments)
        self.participation = Participation(
            mailbox=mailbox,
            algorithm=algorithm or DecoupledDiLoCo(),
            learner_id=learner_id,
            start_parties=start_parties,
            done_parties=done_parties,
            start_timeout=start_timeout,
            done_timeout=done_timeout,
            align=align,
            reseed=reseed,
            exchange_every=exchange_every,
            close_timeout=close_timeout,
            leave_timeout=leave_timeout,
            batch_size=batch_size,
            lease=lease,
            poll_interval=poll_interval,
            outage_timeout=outage_timeout,
            step_timeout=step_timeout,
            keep=keep,
            keep_seconds=keep_seconds,
        )
        self._companion: Companion | None = None

    @property
    def learner_id(self) -> str:
        """This node's name in the run."""
        return self.participation.identify()

    @property
    def stats(self) -> Stats | None:
        """Figures of this node's session, during and after fit, on local rank 0."""
        return self._companion.stats if self._companion is not None else None

    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        trainer = model._trainer  # None where Lightning connects a model without a trainer
        if trainer is None or trainer.state.fn != "fit":
            return
        found = companion_of(trainer)
        if found is None:
            found = Companion(self.participation)
            trainer.callbacks.insert(0, found)  # type: ignore[attr-defined]
        elif found.participation is not self.participation:
            raise ConfigError(f"{type(self).__name__} takes part by itself: remove {type(found).__name__} from the Trainer's callbacks")
        self._companion = found

    def _configure_launcher(self) -> None:
        self._check_launch()  # in Trainer(), before Lightning's launcher starts further processes
        super()._configure_launcher()

    def _check_launch(self) -> None:
        check_launch(
            single_device=self._single_device,
            devices=len(getattr(self, "parallel_devices", None) or ()),
            nodes=int(getattr(self, "num_nodes", 1)),
        )

    def setup_environment(self) -> None:
        self._check_launch()
        super().setup_environment()
        end_with_the_process()
        trainer = self._lightning_module._trainer if self._lightning_module is not None else None
        if trainer is None or trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        group = Group(self)
        self.participation.learner_id = group.lead(self.participation.identify)
        group.lead(self.participation.probe)  # a bucket that cannot be used is told before anything is set up


class GradientMailStrategy(_MailboxMixin, SingleDeviceStrategy):
    """One process and one device on each node; the nodes meet in the mailbox."""

    strategy_name = "gradientmail"
    _single_device = True

    parallel_devices: Sequence[torch.device] = ()
    """Filled in by the Trainer with what ``accelerator`` and ``devices`` say; holds one."""
    num_nodes = 1
    """Filled in by the Trainer, to be refused when it is another."""

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else self._root_device


class GradientMailDDPStrategy(_MailboxMixin, DDPStrategy):
    """Several processes on each node, a replica each, by DDP inside the node; the nodes meet in the mailbox."""

    strategy_name = "gradientmail_ddp"

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # With a launcher of its own, every node's sampler would draw the same samples in the same order.
        return {**super().distributed_sampler_kwargs, "seed": learner_seed(self.learner_id)}


class GradientMailFSDP2Strategy(_MailboxMixin, ModelParallelStrategy):
    """Several processes on each node that share one sharded replica (FSDP2); the nodes meet in the mailbox.

    Like its base it needs a ``configure_model`` that shards the model. Unlike its base it gives all of the node's
    devices to data parallelism unless told otherwise.
    """

    strategy_name = "gradientmail_fsdp2"

    def setup_environment(self) -> None:
        if self._tensor_parallel_size == "auto":
            self._tensor_parallel_size = 1 if self._data_parallel_size == "auto" else self.num_processes // self._data_parallel_size
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_processes // self._tensor_parallel_size
        super().setup_environment()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {**super().distributed_sampler_kwargs, "seed": learner_seed(self.learner_id)}


for _strategy in (GradientMailStrategy, GradientMailDDPStrategy, GradientMailFSDP2Strategy):
    if _strategy.__doc__ is not None:
        _strategy.__doc__ += "\n" + _ARGUMENTS
    if _strategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(_strategy.strategy_name, _strategy, description=(_strategy.__doc__ or "").splitlines()[0])
