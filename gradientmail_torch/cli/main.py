"""The verbs. Each loads what it needs when it is called, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
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
    """Turn errors of our own tree, and files that cannot be read or written, into one message and exit status 1."""
    try:
        yield
    except BrokenPipeError:  # typer's: who reads what is printed has had enough
        raise
    except (GradientMailError, OSError) as error:
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


Prices = Annotated[str | None, typer.Option("--prices", help="A price table of your own, in the form of configs/prices.json.")]


@app.command()
def cost(url: URL, json: Json = False, prices: Prices = None) -> None:
    """Requests and bytes so far, and what they cost in several stores, in all and per node-hour."""
    from gradientmail_torch.cli import cost as costs
    from gradientmail_torch.cli.prices import load
    from gradientmail_torch.cli.run_view import read_run

    with told():
        shown = costs.cost(read_run(open_to_read(url)), load(prices))
        print_json(shown) if json else out.print(costs.screen(shown))


@app.command()
def plan(
    params: Annotated[str, typer.Option(help="Trainable parameters of the model: 1.3e9, 1.3B or 350M.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that will train at the same time.")],
    uplink: Annotated[str, typer.Option(help="Of each node: 100Mbit, 1Gbit, 12.5MB/s.")],
    downlink: Annotated[str | None, typer.Option(help="As --uplink; the same unless given.")] = None,
    step_seconds: Annotated[float, typer.Option(help="Time of one optimizer step on one node.")] = 1.0,
    sync_every: Annotated[int | None, typer.Option(min=1, help="Steps of a cycle; recommended unless given.")] = None,
    fragments: Annotated[int | None, typer.Option(min=1, help="Parts of the model; by its size unless given.")] = None,
    wire: Annotated[str | None, typer.Option(help="fp32, bf16, int8, int4, e3m0 or sparse; recommended unless given.")] = None,
    commit_wire: Annotated[str, typer.Option(help="Format of commits.")] = "bf16",
    momentum: Annotated[bool, typer.Option(help="Whether the outer optimizer has momentum.")] = False,
    json: Json = False,
    prices: Prices = None,
) -> None:
    """Time of a round, stall and dollars from bandwidth, model size and nodes, and the settings to choose."""
    from gradientmail_torch.cli import plan as plans
    from gradientmail_torch.cli.formats import bits_per_second, number
    from gradientmail_torch.cli.prices import load

    with told():
        price_table = load(prices)
        situation = plans.Situation(
            parameters=number(params),
            nodes=nodes,
            uplink_bits_per_s=bits_per_second(uplink),
            downlink_bits_per_s=bits_per_second(downlink or uplink),
            seconds_per_step=step_seconds,
            momentum=momentum,
        )
        recommend = partial(plans.recommend, situation, price_table, fragments=fragments, commit_wire=commit_wire)
        chosen = recommend(wire=wire)
        if sync_every is not None:
            chosen = plans.plan(situation, replace(chosen.settings, sync_every=sync_every), price_table)
        others = tuple(recommend(wire=each) for each in ("fp32", "bf16", "int8", "int4"))
        print_json(chosen) if json else out.print(plans.screen(chosen, price_table, others=others))


@app.command()
def doctor(
    url: URL,
    json: Json = False,
    megabytes: Annotated[float, typer.Option(min=0.001, help="Size of the object by which bandwidth is measured.")] = 18.0,
    params: Annotated[str, typer.Option(help="Parameters of the model whose price is estimated.")] = "100M",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the run whose price is estimated.")] = 4,
    prices: Prices = None,
) -> None:
    """Whether this store does what a run needs: each failure with its cure. Leaves nothing behind.

    Writes, creates, races for objects with 8 threads, lists, uploads in parts, measures latency and bandwidth,
    looks at the clock and the permissions, and estimates the price. Exit status 1 when something failed.
    """
    from gradientmail_torch.cli.doctor import Doctor
    from gradientmail_torch.cli.formats import number
    from gradientmail_torch.cli.prices import load

    marks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failed": ("✗", "bold red"), "skipped": ("–", "dim")}
    with told():
        mailbox = open_mailbox(url, probed=False)
        examination = Doctor(mailbox, prices=load(prices), large_bytes=int(megabytes * 1e6), parameters=number(params), nodes=nodes)
        checks = []
        for check in examination.examine():
            checks.append(check)
            if not json:
                out.print(Text.assemble(marks[check.verdict], f" {check.name}: {printable(check.found)}"), soft_wrap=True)
                if check.cure:
                    out.print(Text(f"  → {printable(check.cure)}", "yellow"), soft_wrap=True)
        if json:
            print_json(checks)
    if any(check.verdict == "failed" for check in checks):
        raise typer.Exit(1)


@app.command()
def export(
    url: URL,
    file: Annotated[Path, typer.Argument(help="*.safetensors, *.pt (state_dict) or *.ckpt (Lightning).")],
    form: Annotated[str | None, typer.Option("--format", help="safetensors, state_dict or lightning; by the name unless given.")] = None,
    dtype: Annotated[str, typer.Option(help="model (as the founder's), fp32, bf16 or fp16.")] = "model",
    template: Annotated[
        Path | None,
        typer.Option(help="A checkpoint of the same model, for what does not travel: frozen parameters, tied names."),
    ] = None,
    trust_template: Annotated[bool, typer.Option("--trust-template", help="Unpickle the template whatever it holds.")] = False,
    hparams: Annotated[str | None, typer.Option(help="The model's arguments as JSON, for load_from_checkpoint.")] = None,
) -> None:
    """The run's parameters as a file that needs neither the mailbox nor this package."""
    from typing import cast, get_args

    from gradientmail_torch.cli.export import Format
    from gradientmail_torch.cli.export import export as save
    from gradientmail_torch.errors import ConfigError

    with told():
        if form is not None and form not in get_args(Format):
            raise ConfigError(f"--format must be one of {', '.join(get_args(Format))}, not {form!r}")
        done = save(
            open_to_read(url),
            file,
            form=cast("Format | None", form),
            dtype=dtype,
            template=template,
            trusted=trust_template,
            hparams=hparams,
        )
        more = f", {done.from_template} of them from the template" if done.from_template else ""
        out.print(f"{done.path}: {done.tensors} tensors{more}, versions {', '.join(map(str, done.versions))}", soft_wrap=True)


@app.command()
def replay(
    url: URL,
    json: Json = False,
    last: Annotated[int, typer.Option(min=0, help="Commits to show; 0 shows all.")] = 20,
    verify: Annotated[bool, typer.Option("--verify", help="Make the commits again from their contributions and compare.")] = False,
) -> None:
    """Who contributed what to which commit, from the commits' own records."""
    from gradientmail_torch.cli import replay as replays
    from gradientmail_torch.cli.run_view import read_run

    with told():
        mailbox = open_to_read(url)
        view = read_run(mailbox, history=True)
        commits = replays.replay(view)
        found = []
        if verify:
            from gradientmail_torch.cli.verify import verify as make_again

            found = make_again(mailbox, view.commits)
        if json:
            print_json({"commits": commits, "totals": replays.totals(commits, len(view.fragments)), "verified": found})
        else:
            out.print(replays.screen(commits, len(view.fragments), last))
            for each in found:
                out.print(Text(printable(each.in_words()), "bold red" if each.problem else "green"), soft_wrap=True)
    if any(each.problem for each in found):
        raise typer.Exit(1)


@app.command()
def gc(
    url: URL,
    delete: Annotated[bool, typer.Option("--delete", help="Delete it; without this it is only said.")] = False,
    keep: Annotated[int, typer.Option(min=1, help="Newest versions of each fragment that stay.")] = 4,
    show: Annotated[bool, typer.Option("--show", help="Name each object.")] = False,
) -> None:
    """What the run no longer needs: old tensors and records, what died learners left. Says it, or deletes it.

    Commits stay, and so does all that the newest versions are made of. While learners are there, only what is
    too old for them is taken.
    """
    from gradientmail_torch.cli import gc as garbage
    from gradientmail_torch.cli.formats import plural
    from gradientmail_torch.cli.run_view import read_run
    from gradientmail_torch.cli.watching import BeatWatch, sightings

    with told():
        mailbox = open_mailbox(url) if delete and "://" in url else open_to_read(url)
        first = read_run(mailbox)
        passing = garbage.passing(mailbox, first.manifest.nonce)
        seen = sightings(mailbox, first.learners, BeatWatch())
        alive = any(sighting.presence in ("alive", "unknown") for sighting in seen.values())
        found = garbage.find(mailbox, read_run(mailbox), keep=keep, alive=alive, seen_before=passing)
        if delete:
            garbage.delete(mailbox, found)
        if show:
            for key in found.keys:
                out.print(printable(key), soft_wrap=True)
        parts = (
            plural(len(found.old_data), "old data object"),
            plural(len(found.old_records), "old record"),
            plural(len(found.lost_foundings), "initial value") + " of lost foundings",
            plural(len(found.probes), "probe"),
        )
        done = "nothing to delete" if not found.keys else "deleted" if delete else "can be deleted (add --delete)"
        out.print(f"{', '.join(parts)}: {done}" + ("; learners are there" if alive else ""), soft_wrap=True)


@app.command()
def report(
    url: URL,
    file: Annotated[Path, typer.Argument(help="The HTML page to write.")],
    log: Annotated[list[str], typer.Option(help="A node's metrics.csv or JSON lines, as FILE or NAME=FILE; may be repeated.")] = [],  # noqa: B006
    prices: Prices = None,
) -> None:
    """The run as one HTML page that needs no network: who was there, rounds, staleness, goodput, cost, losses."""
    from gradientmail_torch.cli.logs import read_logs
    from gradientmail_torch.cli.prices import load
    from gradientmail_torch.cli.report import report as page
    from gradientmail_torch.cli.run_view import read_run
    from gradientmail_torch.clock import SYSTEM_CLOCK

    with told():
        view = read_run(open_to_read(url), history=True)
        file.write_text(page(view, load(prices), read_logs(log), now=SYSTEM_CLOCK.wall()))
        out.print(f"{file}", soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def demo(context: typer.Context) -> None:
    """Three nodes on this machine train one model; one comes late, one is killed and comes back."""
    from gradientmail_torch.cli.demo import demo as start

    with told():
        start(context.args)
