"""Three nodes train one model through a mailbox; one comes late, one is killed and comes back.

``make demo``, or ``gradientmail demo`` where the package is installed, runs it on this machine alone, with a directory as
the mailbox. ``--mailbox s3://bucket/prefix`` runs the same on a bucket. Ends with a table and a picture of the loss curves,
beside one process with the same tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from places import empty, new_run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

HERE = Path(__file__).parent
NODES = ("node-0", "node-1", "node-2")
LATE, VICTIM = "node-1", "node-2"
BATCH = 16
console = Console(width=128)


@dataclass
class Node:
    """A node process and what it has reported so far."""

    name: str
    events_file: Path
    log_file: Path
    process: subprocess.Popen[bytes] | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    steps_before: int = 0
    """Steps of earlier lives."""
    _read: int = 0

    def launch(self, options: list[str]) -> None:
        """Start it as it would be started on a rented machine."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(HERE / "train.py")]
        command += ["--learner-id", self.name, "--events", str(self.events_file), "--quiet", *options]
        # Its own Python's modules, not the folder's: as on a machine that has the package installed.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def poll(self) -> None:
        """Read what it has reported since the last look."""
        if not self.events_file.exists():
            return
        with self.events_file.open() as file:
            file.seek(self._read)
            for line in file:
                if line.endswith("\n"):
                    self._read += len(line.encode())
                    self.events.append(json.loads(line))

    @property
    def steps(self) -> int:
        """Steps of its present life."""
        for event in reversed(self.events):
            if event["event"] == "start":
                return 0
            if event["event"] == "step":
                return int(event["step"])
        return 0

    @property
    def result(self) -> dict[str, Any] | None:
        return self.events[-1] if self.events and self.events[-1]["event"] == "end" else None

    def kill(self) -> None:
        """SIGKILL to the whole machine, so to speak: the launcher and its worker."""
        assert self.process is not None
        worker = [event["pid"] for event in self.events if event["event"] == "start"][-1]
        os.killpg(self.process.pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        self.process.wait()

    def failed(self) -> bool:
        return self.process is not None and self.process.poll() not in (None, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", help="URL of a mailbox; a directory under --out unless given")
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each node")
    parser.add_argument("--text", help="a file to train on instead of Python's help topics")
    options = parser.parse_args()
    if options.steps < 16:
        parser.error("--steps must be at least 16, so that a node can be killed half-way")
    empty(options.out)
    mailbox = new_run(options.mailbox, "demo") if options.mailbox else str(options.out / "mailbox")
    shared = ["--text", options.text] if options.text else []
    nodes = {name: Node(name, options.out / f"{name}.jsonl", options.out / f"{name}.log") for name in NODES}
    console.print(f"[bold]Three nodes, one model, one mailbox:[/] {mailbox}\n")
    began = time.monotonic()
    with stopping(nodes):
        train(nodes, options.steps, ["--mailbox", mailbox, "--validate-every", str(options.steps // 8), *shared])
    alone = train_alone(nodes, options, shared)
    report(nodes, alone, options.out, time.monotonic() - began, every=options.steps // 8)
    tell_what_next(mailbox, options.out)
    if len({node.result["val_loss"] for node in nodes.values() if node.result}) != 1:
        raise SystemExit(1)


@contextmanager
def stopping(nodes: dict[str, Node]) -> Iterator[None]:
    """Leave no process behind, whatever happens: also when this one is told to stop, or its terminal is closed."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]  # nohup ignores one
    for number in heard:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for node in nodes.values():
            if node.process is not None and node.process.poll() is None:
                node.process.terminate()
        for number in heard:
            signal.signal(number, signal.SIG_DFL)


def train(nodes: dict[str, Node], steps: int, options: list[str]) -> None:
    """Run the three nodes: the second joins late, the third is killed half-way and comes back."""
    early = len(nodes) - 1
    done = ["--done-parties", str(len(nodes))]
    for name, node in nodes.items():
        if name != LATE:
            node.launch([*options, "--steps", str(steps), "--start-parties", str(early), *done])
    with progress_bars(nodes, steps) as show:
        come_back_at = None
        while not all(node.result for node in nodes.values()):
            time.sleep(0.2)
            show()
            late, victim = nodes[LATE], nodes[VICTIM]
            if late.process is None and nodes[NODES[0]].steps >= steps // 8:
                console.print(f"  {LATE} boots now and joins the run in the middle")
                late.launch([*options, "--steps", str(steps * 3 // 4), *done])
            if victim.steps_before == 0 and victim.steps >= steps * 2 // 5 and victim.result is None:
                victim.kill()
                victim.poll()
                victim.steps_before = victim.steps
                come_back_at = time.monotonic() + 4
                console.print(f"  {VICTIM} gets SIGKILL after {victim.steps_before} steps; the others train on")
            if come_back_at is not None and time.monotonic() >= come_back_at:
                come_back_at = None
                console.print(f"  {VICTIM} is back under its name and does the rest")
                victim.launch([*options, "--steps", str(steps - victim.steps_before), *done])
            for node in nodes.values():
                if node.failed() and come_back_at is None:
                    raise SystemExit(f"{node.name} failed; the end of {node.log_file}:\n" + node.log_file.read_text()[-3000:])


@contextmanager
def progress_bars(nodes: dict[str, Node], steps: int) -> Iterator[Any]:
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {
            name: progress.add_task(name, total=steps * 3 // 4 if name == LATE else steps, loss="not here yet") for name in nodes
        }

        def show() -> None:
            for name, node in nodes.items():
                node.poll()
                losses = [event["loss"] for event in node.events[-20:] if event["event"] == "step"]
                text = f"loss {sum(losses) / len(losses):.3f}" if losses else ("starting" if node.process else "not here yet")
                back = node.steps if node.events and node.steps_before and node.process and node.process.poll() is None else 0
                progress.update(bars[name], completed=node.steps_before + back if node.steps_before else node.steps, loss=text)

        yield show


def run_samples(nodes: dict[str, Node]) -> int:
    """Samples that all lives of all nodes have trained on."""
    total = 0
    for node in nodes.values():
        life = 0
        for event in [*node.events, {"event": "start"}]:
            if event["event"] == "start":
                total, life = total + life, 0
            elif event["event"] == "step":
                life = event["samples"]
    return total


def train_alone(nodes: dict[str, Node], options: argparse.Namespace, shared: list[str]) -> Node:
    """One process, without a mailbox, on as many tokens as the three nodes together."""
    alone = Node("alone", options.out / "alone.jsonl", options.out / "alone.log")
    steps = run_samples(nodes) // BATCH
    console.print(f"\nOne process on the same number of tokens, {steps} steps, for comparison")
    with stopping({"alone": alone}), progress_bars({"alone": alone}, steps) as show:
        alone.launch(["--steps", str(steps), "--validate-every", str(options.steps // 4), *shared])
        while alone.result is None:
            time.sleep(0.2)
            show()
            if alone.failed():
                raise SystemExit(alone.log_file.read_text()[-3000:])
    return alone


def report(nodes: dict[str, Node], alone: Node, out: Path, seconds: float, *, every: int) -> None:
    table = Table(title="Nodes (the last life of each)")
    for column in (
        "node",
        "steps",
        "samples",
        "rounds",
        "discarded",
        "stall ms/step",
        "stall %",
        "MB up",
        "MB down",
        "val loss of the run",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    losses = set()
    for node in nodes.values():
        assert node.result is not None
        stats = node.result["stats"]
        losses.add(node.result["val_loss"])
        table.add_row(
            node.name,
            f"{stats['steps']}",
            f"{stats['samples']}",
            f"{stats['tally']['merged']}",
            f"{stats['tally']['discarded_work']['steps']}",
            f"{1e3 * stats['stall_seconds'] / max(1, stats['steps']):.2f}",
            f"{100 * stats['stall_seconds'] / node.result['seconds']:.2f}",
            f"{stats['usage']['bytes_up'] / 1e6:.1f}",
            f"{stats['usage']['bytes_down'] / 1e6:.1f}",
            f"{node.result['val_loss']!r}",
        )
    console.print(table)
    first = [event["loss"] for event in nodes[NODES[0]].events if event["event"] == "validation"]
    assert alone.result is not None
    picture = plot(nodes, alone, out)
    console.print(f"All nodes report the same loss: [bold]{len(losses) == 1}[/]")
    console.print(f"Validation loss of the run: {first[0]:.4f} after {every} steps, {max(losses):.4f} at the end")
    console.print(
        f"One process that made {alone.result['steps']} steps one after the other on the same tokens: {alone.result['val_loss']:.4f}"
    )
    console.print(f"Loss curves: {picture}   ({seconds:.0f} s in all)")


def tell_what_next(mailbox: str, out: Path) -> None:
    """Commands that can be copied, so each on one line however long it is."""
    command = Path(sys.executable).parent / "gradientmail"
    here = os.path.relpath(command) if command.is_relative_to(Path.cwd()) else "gradientmail"
    logs = " ".join(f"--log {out / name}.jsonl" for name in NODES)
    console.print("\nThe run as a page, the model as a file:")
    for line in (f"report '{mailbox}' {out / 'report.html'} {logs}", f"export '{mailbox}' {out / 'model.safetensors'}"):
        console.print(f"  {here} {line}", soft_wrap=True, highlight=False)


def plot(nodes: dict[str, Node], alone: Node, out: Path) -> Path:
    """Training losses of each node over time, and validation losses over samples."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    begin = min(node.events[0]["at"] for node in nodes.values())
    for node in nodes.values():
        steps = [event for event in node.events if event["event"] == "step"]
        smooth = [sum(e["loss"] for e in steps[max(0, i - 9) : i + 1]) / min(10, i + 1) for i in range(len(steps))]
        left.plot([event["at"] - begin for event in steps], smooth, ".", markersize=2, label=node.name)
    left.set(xlabel="seconds", ylabel="training loss (mean of 10 steps)", title="Nodes come, die and come back")
    left.legend(markerscale=5)
    reached = sorted((event["at"], event["loss"]) for node in nodes.values() for event in node.events if event["event"] == "validation")
    stepped = sorted(event["at"] for node in nodes.values() for event in node.events if event["event"] == "step")
    samples = [BATCH * sum(at <= when for at in stepped) for when, _ in reached]
    right.plot(samples, [loss for _, loss in reached], "o-", markersize=3, label="the run's committed parameters")
    single = [(event["samples"], event["loss"]) for event in alone.events if event["event"] == "validation"]
    right.plot([x for x, _ in single], [y for _, y in single], "s--", markersize=3, label="one process, same tokens")
    right.set(xlabel="samples trained on, all nodes together", ylabel="validation loss", title="One model")
    right.legend()
    picture = out / "demo.png"
    figure.savefig(picture, dpi=120)
    return picture


if __name__ == "__main__":
    main()
