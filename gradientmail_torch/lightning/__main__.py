"""``python -m gradientmail_torch.lightning fit --config run.yaml``: a LightningCLI that knows the strategies' names.

Model and data are named in the YAML by their class paths. Nothing is written beside what the YAML asks for: several
nodes may share a working directory.
"""

from __future__ import annotations

from lightning.pytorch.cli import ArgsType, LightningCLI

import gradientmail_torch.lightning  # noqa: F401  (registers them)


def main(args: ArgsType = None, *, run: bool = True) -> LightningCLI:
    """Parse ``args`` (the command line's when left out) and run the subcommand, or only construct everything."""
    return LightningCLI(save_config_callback=None, args=args, run=run)


if __name__ == "__main__":
    main()
