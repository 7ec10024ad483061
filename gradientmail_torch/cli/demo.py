"""``gradientmail demo``: starts ``examples/demo.py``, which the wheel carries with the files that it needs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from gradientmail_torch.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent / "examples")
"""Of a wheel, of a checkout."""


def demo(arguments: Sequence[str]) -> None:
    """Run the demo in this process. Raises :class:`ConfigError` where its programs are missing, and SystemExit as it does."""
    program = next((folder / "demo.py" for folder in _FOLDERS if (folder / "demo.py").exists()), None)
    if program is None:
        raise ConfigError(f"the demo's programs are in neither of {', '.join(map(str, _FOLDERS))}: install the package anew")
    before = sys.argv, sys.path
    sys.argv, sys.path = ["gradientmail demo", *arguments], [str(program.parent), *sys.path]
    try:
        importlib.import_module(program.stem).main()
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "rich"):
            raise
        raise ConfigError(f"the demo needs {error.name}: pip install 'gradientmail-torch[demo]'") from error
    finally:
        sys.argv, sys.path = before
