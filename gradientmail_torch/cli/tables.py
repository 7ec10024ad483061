"""Plain tables for the terminal. What a mailbox holds may be anything, so control characters never get through."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text


def printable(text: str) -> str:
    """``text`` with what moves a cursor or changes a colour shown as a mark."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = (), header: bool = True) -> Table:
    """A table without lines; columns named in ``right`` are aligned to the right, those in ``whole`` never broken."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), show_header=header)
    for place, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=place == 0 or column in whole, justify="right" if column in right else "left")
    return made


def add(to: Table, *cells: object) -> None:
    """A row. Cells are taken as they are, without markup; a pair is a text and its style."""
    to.add_row(*(Text(printable(str(cell[0])), cell[1]) if isinstance(cell, tuple) else Text(printable(str(cell))) for cell in cells))
