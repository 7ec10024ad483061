"""Launches that cannot work, refused at set-up with the cure."""

from __future__ import annotations

from gradientmail_torch import config
from gradientmail_torch.errors import ConfigError

_EACH_NODE = (
    "start each node on its own, with 'python train.py' or 'torchrun --standalone --nproc-per-node=gpu train.py', and give it a learner_id"
)


def check_launch(*, single_device: bool, devices: int, nodes: int) -> None:
    """Raises :class:`ConfigError` for a launch in which the nodes could not work together through the mailbox."""
    if config.launched_nodes() > 1 or nodes > 1:
        raise ConfigError(
            f"{max(config.launched_nodes(), nodes)} nodes share one launcher or num_nodes is above 1, but nodes meet in the mailbox only: "
            f"set num_nodes=1 and {_EACH_NODE}"
        )
    if single_device and config.launched_processes() > 1:
        raise ConfigError(
            f"{config.launched_processes()} processes were launched on this node, but GradientMailStrategy drives one device: "
            "use GradientMailDDPStrategy or GradientMailFSDP2Strategy, or one process"
        )
    if single_device and devices > 1:
        raise ConfigError(f"devices={devices} with GradientMailStrategy, which drives one: use GradientMailDDPStrategy, or devices=1")
