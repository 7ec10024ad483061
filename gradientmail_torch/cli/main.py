"""The verbs. Each loads what it needs when it is called, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

import typer
from rich.console import Console
from rich.text import Text

from gradientmail_torch.cli.tables import printable
from gradientmail_torch.errors import GradientMailError, MailboxMissing
from gradientmail_torch.mailbox import Mailbox, open_mailbox

app = typer.Typer(
    name="gradientmail",
    help="Look at a run from outside, examine a store, get the model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

URL = Annotated[
    str,
    typer.Argument(help="The run's mailbox: s3://bucket/run?endpoint_url=…&region=…, or a directory.", envvar="GRADIENTMAIL_MAILBOX"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
out = Console(markup=False, highlight=False)
"""What was asked for. Names come from the mailbox and may hold anything, so nothing is taken as markup."""
err = Console(stderr=True, markup=False, highlight=False)


@contextmanager
def told() -> Iterator[None]:
    """Turn errors of our own tree into one message and exit status 1."""
    try:
        yield
    except GradientMailError as error:
        err.print(Text.assemble((f"{type(error).__name__}: ", "bold red"), printable(str(error))), soft_wrap=True)
        raise typer.Exit(1) from None


def open_to_read(url: str) -> Mailbox:
    """The mailbox behind ``url``; nothing is written, and a directory that is not there is not made."""
    parts = urlsplit(url)
    if "://" not in url or parts.scheme == "file":
        path = Path(unquote(parts.path) if parts.scheme == "file" else url).expanduser()
        if not path.is_dir():
            raise MailboxMissing(f"there is no directory {str(path)!r}: correct the path, or start a run there")
    return open_mailbox(url, probed=False)


def print_json(value: Any) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        out.print(f"gradientmail {installed('gradientmail-torch')}")
        raise typer.Exit


@app.command()
def status(
    url: URL,
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Stay, and show what changes.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to watch, at most, until it is told who is there.")] = 20.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks, with --watch.")] = 2.0,
) -> None:
    """Who is in the run, whether it advances, and who is waited for.

    Who is there is told by watching: a learner is here when its beat changes while this command looks, which
    takes some seconds. No clocks are compared.
    """
    from rich.live import Live

    from gradientmail_torch.cli.status import read_status, screen
    from gradientmail_torch.cli.watching import BeatWatch
    from gradientmail_torch.clock import SYSTEM_CLOCK

    with told():
        mailbox, beats = open_to_read(url), BeatWatch()
        if not watch:
            shown = read_status(mailbox, beats, longest_s=wait)
            print_json(shown) if json else out.print(screen(shown))
            return
        with Live(console=out, screen=out.is_terminal, auto_refresh=False) as live:
            while True:
                live.update(screen(read_status(mailbox, beats, longest_s=0)), refresh=True)
                SYSTEM_CLOCK.sleep(every)
