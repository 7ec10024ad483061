"""A Thinker tunes learning rate and width of a small GPT on nodes that come and go.

``python examples/steering_campaign.py`` runs it on this machine alone, with a directory as the mailbox: two nodes, a
third that joins late, one that is killed in the middle of a trial. ``--mailbox s3://bucket/prefix`` uses a bucket, and
more nodes may then be started on any machine::

    python examples/steering_campaign.py --node node-7 --mailbox s3://bucket/prefix

Each trial is a Lightning fit. Its losses stream in; a trial that is worse than most is cancelled. The best one is
evaluated by all nodes together. Ends with the table of trials and a picture.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from places import empty
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradientmail_torch.patterns.steering import (
    BaseThinker,
    MailboxQueues,
    MailboxTaskServer,
    ResourceCounter,
    Result,
    event_responder,
    overhead_summary,
    result_processor,
    task_submitter,
)

NODES, LATE, VICTIM = ("node-0", "node-1"), "node-2", "node-1"
WIDTHS = (32, 64, 96)
console = Console(width=128)


@dataclass
class Trial:
    lr: float
    width: int
    task_id: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Steps and validation losses."""
    node: str = ""
    attempt: int = 1
    state: str = "waiting"
    loss: float = math.inf
    weights: Any = None
    result: Result | None = None


class Tuner(BaseThinker):
    """Keeps every slot of every node busy with a trial until all have been tried."""

    def __init__(self, queues: MailboxQueues, trials: list[Trial], *, steps: int, every: int, mailbox: str) -> None:
        super().__init__(queues, ResourceCounter.elastic(queues, refresh_s=1.0))
        self.trials = trials
        self.steps, self.every, self.mailbox = steps, every, mailbox
        self.waiting = iter(trials)
        self.by_task: dict[str, Trial] = {}
        self.all_tried = threading.Event()
        self.verdict: float | None = None

    @task_submitter
    def submit(self) -> None:
        trial = next(self.waiting, None)
        if trial is None:
            self.done.wait()  # the slot stays taken: there is nothing to do with it
            return
        arguments = {"lr": trial.lr, "width": trial.width, "steps": self.steps, "every": self.every}
        trial.state = "sent"
        trial.task_id = self.queues.send_inputs(method="fit_trial", input_kwargs=arguments, topic="trial")
        self.by_task[trial.task_id] = trial

    @result_processor(topic="trial")
    def learn(self, result: Result) -> None:
        while (trial := self.by_task.get(result.task_id)) is None:
            time.sleep(0.01)  # it was quicker than our note of it
        if result.worker_info is not None:
            trial.node, trial.attempt = result.worker_info.server or "", result.worker_info.attempt or 1
        if result.complete is False:
            self.progressed(trial, result.value["step"], result.value["loss"])
            return
        trial.result = result
        if result.success:
            trial.state, trial.loss, trial.weights = "done", result.value["loss"], result.value["weights"]
        elif trial.state != "cancelled":
            trial.state = "failed"
            self.logger.error("%s", result.failure_info and (result.failure_info.traceback or result.failure_info.exception))
        self.rec.release()
        if all(trial.state in ("done", "cancelled", "failed") for trial in self.trials):
            self.all_tried.set()

    def progressed(self, trial: Trial, step: int, loss: float) -> None:
        """Cancel a trial that has had a quarter of its steps and is worse than the median of those that have come as far."""
        if trial.curve and step <= trial.curve[-1][0]:  # another node has begun it again
            trial.curve.clear()
        trial.curve.append((step, loss))
        trial.state = trial.state if trial.state == "cancelled" else "running"
        others = [loss for other in self.trials if other is not trial for at, loss in other.curve if at == step]
        hopeless = len(others) >= 3 and self.steps // 4 <= step < self.steps and not loss <= statistics.median(others)
        if hopeless and self.queues.cancel(trial.task_id):
            trial.state = "cancelled"

    @event_responder(event_name="all_tried")
    def evaluate_the_best(self) -> None:
        """Every node evaluates a share of the text; the parts come together at a synchronization node."""
        from trials import meeting

        best = self.best
        shards = max(1, len(self.queues.servers()))
        for shard in range(shards):
            arguments = {"weights": best.weights, "width": best.width, "shard": shard, "shards": shards}
            arguments |= {"mailbox": self.mailbox, "campaign": self.queues.name}
            self.queues.send_inputs(method="evaluate", input_kwargs=arguments, topic="evaluation", keep_inputs=False)

        def reduce(parts: dict[str, Any], _: object) -> float:
            return sum(part["loss"] for part in parts.values()) / sum(part["windows"] for part in parts.values())

        for _ in range(shards):
            result = self.queues.get_result("evaluation")
            if not result.success:
                raise RuntimeError(f"the evaluation failed: {result.failure_info}")
        self.verdict = meeting(self.mailbox, self.queues.name, shards, "thinker").wait(reduce, timeout=60).value
        self.done.set()

    @property
    def best(self) -> Trial:
        return min(self.trials, key=lambda trial: trial.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mailbox", help="URL of a mailbox; a directory under --out unless given")
    parser.add_argument("--campaign", default="gpt", help="name of the campaign in the mailbox")
    parser.add_argument("--out", type=Path, default=Path("out/steering"))
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of a trial")
    parser.add_argument("--node", help="be the node of this name instead, until the campaign ends")
    options = parser.parse_args()
    if options.node:
        from trials import evaluate, fit_trial

        queues = campaign_queues(options.mailbox, options.campaign)
        MailboxTaskServer([fit_trial, evaluate], queues, learner_id=options.node, start_method="forkserver").run()
        return
    empty(options.out)
    mailbox = options.mailbox or str((options.out / "mailbox").absolute())
    run(options, mailbox)


def campaign_queues(mailbox: str, name: str) -> MailboxQueues:
    return MailboxQueues(mailbox, topics=["trial", "evaluation"], name=name, poll_interval=0.25, lease=6.0)


def candidates(count: int, rng: random.Random) -> list[Trial]:
    """Learning rates spread evenly over three decades, widths in turn, in random order."""
    rates = [10 ** (-4.0 + 3.0 * (place + rng.random()) / count) for place in range(count)]
    found = [Trial(lr=rate, width=WIDTHS[place % len(WIDTHS)]) for place, rate in enumerate(rates)]
    rng.shuffle(found)
    return found


def run(options: argparse.Namespace, mailbox: str) -> None:
    began = time.monotonic()
    queues = campaign_queues(mailbox, options.campaign)
    trials = candidates(options.trials, random.Random(1))
    tuner = Tuner(queues, trials, steps=options.steps, every=max(1, options.steps // 8), mailbox=mailbox)
    console.print(f"[bold]{len(trials)} trials on nodes that come and go:[/] {mailbox}\n")
    with nodes(options.out, mailbox, options.campaign) as launch:
        for name in NODES:
            launch(name)
        tuner.start()
        steer(tuner, launch)
        tuner.join()
        queues.send_kill_signal()
    report(tuner, options.out, time.monotonic() - began)


@contextmanager
def nodes(out: Path, mailbox: str, campaign: str) -> Iterator[Any]:
    """Starts node processes, as on rented machines; ends those that are left."""
    started: dict[str, subprocess.Popen[bytes]] = {}

    def launch(name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--node", name, "--mailbox", mailbox, "--campaign", campaign]
        with (out / f"{name}.log").open("ab") as log:
            started[name] = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return started[name]

    launch.started = started  # type: ignore[attr-defined]
    try:
        yield launch
        for process in started.values():
            process.wait(60)
    finally:
        for process in started.values():
            if process.poll() is None:
                process.terminate()
                process.wait()


def steer(tuner: Tuner, launch: Any) -> None:
    """Show what goes on, let a node join late, and kill one in the middle of a trial."""
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("trials", total=len(tuner.trials), note="")
        bars: dict[str, Any] = {}
        while tuner.is_alive():
            time.sleep(0.2)
            ended = [trial for trial in tuner.trials if trial.state in ("done", "cancelled", "failed")]
            progress.update(total, completed=len(ended), note=f"best loss {tuner.best.loss:.3f}" if ended else "nodes are starting")
            for trial in tuner.trials:
                if trial.curve and trial.task_id not in bars:
                    bars[trial.task_id] = progress.add_task(f"lr {trial.lr:.1e} width {trial.width}", total=tuner.steps, note="")
                if trial.task_id in bars and trial.curve:
                    step, loss = trial.curve[-1]
                    note = f"loss {loss:.3f} on {trial.node}" + (f", {trial.state}" if trial.state != "running" else "")
                    progress.update(bars[trial.task_id], completed=step, note=note, visible=trial not in ended)
            if LATE not in launch.started and len(ended) >= len(tuner.trials) // 4:
                console.print(f"  {LATE} boots now and joins")
                launch(LATE)
            victim = launch.started[VICTIM]
            busy = any(trial.node == VICTIM and trial.state == "running" for trial in tuner.trials)
            if ended and busy and victim.poll() is None:
                victim.send_signal(signal.SIGKILL)
                victim.wait()
                console.print(f"  {VICTIM} gets SIGKILL in the middle of a trial; another node will take it over")


def report(tuner: Tuner, out: Path, seconds: float) -> None:
    table = Table(title="Trials, the best first")
    for column in ("lr", "width", "steps", "val loss", "state", "node", "attempt", "running s", "efficiency"):
        table.add_column(column, justify="right", no_wrap=True)
    for trial in sorted(tuner.trials, key=lambda trial: (trial.loss, trial.curve[-1][1] if trial.curve else math.inf)):
        parts = trial.result.overhead() if trial.result is not None else None
        table.add_row(
            f"{trial.lr:.2e}",
            str(trial.width),
            str(trial.curve[-1][0] if trial.curve else 0),
            f"{trial.curve[-1][1]:.4f}" if trial.curve else "-",
            trial.state,
            trial.node,
            str(trial.attempt),
            "-" if parts is None or parts.running_s is None else f"{parts.running_s:.1f}",
            "-" if parts is None or parts.efficiency is None else f"{parts.efficiency:.0%}",
        )
    console.print(table)
    console.print(overhead_summary(trial.result for trial in tuner.trials if trial.result is not None))
    best = tuner.best
    console.print(
        f"\nBest: lr {best.lr:.2e}, width {best.width}. All nodes together find a loss of [bold]{tuner.verdict:.4f}[/] on the whole text."
    )
    console.print(f"Picture: {plot(tuner, out)}   ({seconds:.0f} s in all)")


def plot(tuner: Tuner, out: Path) -> Path:
    """The curve of each trial, and what each learning rate came to."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    colors = dict(zip(WIDTHS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for trial in tuner.trials:
        if trial.curve:
            steps, losses = zip(*trial.curve, strict=True)
            style = "-" if trial.state == "done" else ":"
            left.plot(steps, losses, style, color=colors[trial.width], marker="o", markersize=3)
            right.plot(trial.lr, losses[-1], "o" if trial.state == "done" else "x", color=colors[trial.width])
    left.set(xlabel="step", ylabel="validation loss", title="Trials (dotted: cancelled)")
    right.set(xlabel="learning rate", ylabel="last validation loss", xscale="log", title="Learning rate and width (x: cancelled)")
    right.legend(handles=[plt.Line2D([], [], marker="o", linestyle="", color=colors[width], label=f"width {width}") for width in WIDTHS])
    picture = out / "campaign.png"
    figure.savefig(picture, dpi=120)
    return picture


if __name__ == "__main__":
    main()
