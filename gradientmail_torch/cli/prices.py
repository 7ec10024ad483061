"""What stores charge: a dated table, ``configs/prices.json``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import msgspec

from gradientmail_torch.errors import ConfigError
from gradientmail_torch.messages import Beat, Earlier

Dollars = Annotated[float, msgspec.Meta(ge=0)]

_WRITES = ("put", "list")  # what stores bill as such; deletes are free


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One store's list prices."""

    label: str
    dollars_per_million_writes: Dollars
    dollars_per_million_reads: Dollars
    dollars_per_gb_out: Dollars
    """To where the nodes are; what comes in is free."""
    dollars_per_gb_month: Dollars
    source: str


class PriceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    date: str
    note: str
    stores: dict[str, Price]

    def get(self, name: str) -> Price:
        if name not in self.stores:
            raise ConfigError(f"no prices for the store {name!r}: choose of {', '.join(self.stores)}, or give a table of your own")
        return self.stores[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a store is used for, in the units in which it bills."""

    writes: float = 0.0
    reads: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0

    def __add__(self, other: Use) -> Use:
        return Use(
            writes=self.writes + other.writes,
            reads=self.reads + other.reads,
            bytes_up=self.bytes_up + other.bytes_up,
            bytes_down=self.bytes_down + other.bytes_down,
        )

    def __mul__(self, factor: float) -> Use:
        return Use(
            writes=self.writes * factor,
            reads=self.reads * factor,
            bytes_up=self.bytes_up * factor,
            bytes_down=self.bytes_down * factor,
        )

    def dollars(self, price: Price) -> float:
        """What it costs, without the keeping of what is stored."""
        requests = self.writes * price.dollars_per_million_writes + self.reads * price.dollars_per_million_reads
        return requests / 1e6 + self.bytes_down / 1e9 * price.dollars_per_gb_out


def used(by: Beat | Earlier) -> Use:
    """What a life has used until its last beat, or the lives before it."""
    writes = sum(by.requests.get(operation, 0) for operation in _WRITES)
    return Use(writes=writes, reads=by.requests.get("get", 0), bytes_up=by.bytes_up, bytes_down=by.bytes_down)


def load(path: str | None = None) -> PriceTable:
    """The table in the file ``path``, or the one that comes with the package."""
    try:
        data = (Path(path) if path else files("gradientmail_torch.cli").joinpath("prices.json")).read_bytes()
        return msgspec.json.decode(data, type=PriceTable)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"the price table {path or 'prices.json'!r} cannot be read: {error}") from error


def recognize(mailbox: str) -> str:
    """The name of the store that a mailbox's text form speaks of."""
    if not mailbox.startswith("s3:"):
        return "own"
    if " at " not in mailbox:
        return "aws"
    for mark, name in (("cloudflarestorage", "r2"), ("amazonaws", "aws"), ("tigris", "tigris"), ("storage.dev", "tigris")):
        if mark in mailbox:
            return name
    return "own"
