"""Where an example puts what it makes: nothing that is there already is touched."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

MARK = ".gradientmail-example"
"""Says that a folder is an example's."""


def empty(folder: Path) -> None:
    """An empty folder. What an earlier example left is removed, and nothing else."""
    folder = folder.resolve()  # a link stays: what it leads to is emptied
    if folder.exists() and not folder.is_dir():
        raise SystemExit(f"{folder} is a file: give --out a folder that is not there yet")
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).exists():
            raise SystemExit(f"{folder} holds something that is no example's: give --out a folder that is not there yet")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def new_run(url: str, name: str = "run") -> str:
    """A part of a mailbox that no earlier run has used: the URL, or directory, of a folder below ``url``."""
    place, question, parameters = url.partition("?")
    return f"{place.rstrip('/')}/{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}{question}{parameters}"
