"""Figures as people read them, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gradientmail_torch.errors import ConfigError

_BITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


def count(number: float) -> str:
    """``391264`` as ``391 k``."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:g}"


def size(number_bytes: float) -> str:
    """Bytes in decimal units, as stores bill them."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(number_bytes) >= limit:
            return f"{number_bytes / limit:.1f} {unit}"
    return f"{number_bytes:.0f} B"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def dollars(amount: float) -> str:
    if amount == 0:
        return "0"
    return f"{amount:.2f}" if amount >= 1 else f"{amount:.2g}" if amount >= 1e-4 else "< 0.0001"


def plural(number: int, noun: str, nouns: str = "") -> str:
    return f"{number} {noun if number == 1 else nouns or noun + 's'}"


def some(names: Sequence[str], most: int = 8) -> str:
    """The first of ``names``, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def bits_per_second(text: str) -> float:
    """``100Mbit``, ``1 Gbit/s``, ``12.5MB/s`` as bits per second; raises :class:`ConfigError`."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmg]?)(bit|bps|b|B)(?:it|its|ytes?)?(?:/s|ps)?\s*", text, re.I)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"{text!r} is no bandwidth: write '100Mbit', '1Gbit' or '12.5MB/s'")
    in_bytes = found[3] == "B"
    return float(found[1]) * _BITS[found[2].lower()] * (8 if in_bytes else 1)


def number(text: str) -> float:
    """``1.3e9``, ``1.3B``, ``350M`` as a number; raises :class:`ConfigError`."""
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kKmMgGbBtT]?)\s*", text)
    if found is None:
        raise ConfigError(f"{text!r} is no number of parameters: write '1.3e9', '1.3B' or '350M'")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}[found[2].lower()]
