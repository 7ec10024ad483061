"""What a node's own logs say, for the report: Lightning's ``metrics.csv``, or one JSON object a line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradientmail_torch.errors import ConfigError

Curve = list[tuple[float, float]]


def read_logs(given: Sequence[str]) -> dict[str, dict[str, Curve]]:
    """The curves of each log by the name of its column. A log is given as ``path`` or ``name=path``.

    A log without a name has that of its folder, or the whole path where another has that name.
    """
    found: dict[str, dict[str, Curve]] = {}
    for text in given:
        name, _, rest = text.rpartition("=")
        path = Path(rest)
        name = name or _name_of(path)
        if name in found:
            name = str(path)
        if name in found:
            raise ConfigError(f"two logs are named {name!r}: give them as NAME=FILE")
        found[name] = _curves(_rows(path))
    return found


def pick(logs: Mapping[str, Mapping[str, Curve]], part: str) -> dict[tuple[str, str], Curve]:
    """Curves whose column's name holds ``part``, by log and column."""
    return {(log, column): curve for log, curves in logs.items() for column, curve in curves.items() if part in column}


def _name_of(path: Path) -> str:
    """Lightning puts ``metrics.csv`` into ``NAME/version_0/``."""
    parts = [part for part in path.with_suffix("").parts if part != "metrics" and not part.startswith("version_")]
    return parts[-1] if parts else path.name


def _rows(path: Path) -> Iterator[Any]:
    try:
        with path.open(newline="") as file:
            if path.suffix == ".csv":
                yield from csv.DictReader(file)
            else:
                yield from (json.loads(line) for line in file if line.strip())
    except (OSError, ValueError, csv.Error) as error:
        what = "It must be Lightning's metrics.csv or one JSON object a line"
        raise ConfigError(f"the log {str(path)!r} cannot be read: {error}. {what}") from error


def _curves(rows: Iterator[Any]) -> dict[str, Curve]:
    found: dict[str, Curve] = {}
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            continue
        at = _number(row.get("step"))
        at = _number(row.get("samples")) if at is None else at
        kind = f"{row['event']} " if isinstance(row.get("event"), str) else ""
        for column, cell in row.items():
            value = _number(cell)
            if column not in ("step", "samples", "epoch", "event", "at") and value is not None:
                found.setdefault(kind + str(column), []).append((float(place) if at is None else at, value))
    return found


def _number(cell: object) -> float | None:
    if isinstance(cell, bool) or not isinstance(cell, (str, int, float)) or cell == "":
        return None
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
