"""The command ``gradientmail``: look at a run from outside, examine a store, get the model out.

Runs without torch, but for ``export`` and ``replay --verify``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from gradientmail_torch.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.exit(f"gradientmail needs {error.name}: pip install 'gradientmail-torch[cli]'")
    app()
