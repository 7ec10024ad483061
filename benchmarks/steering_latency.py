"""What steering adds to a task: our queues and servers beside Colmena's own, on the same tasks, in one run.

``python -m benchmarks.steering_latency`` prints the table and writes it to ``benchmarks/results/steering.json``.
For each pair of queue and server: tasks one after the other, whose time from request to result less that of the function
is the latency that was added; and a batch of tasks at once on two workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.steering_work import fifty_milliseconds, nothing
from gradientmail_torch.mailbox import CountingMailbox, open_mailbox
from gradientmail_torch.patterns.steering import LocalTaskServer, MailboxQueues, MailboxTaskServer, ParslTaskServer, PipeQueues
from gradientmail_torch.patterns.steering.report import percentile
from gradientmail_torch.testing.s3_server import S3Server

ROOT = Path(__file__).parents[1]
METHODS = [nothing, fifty_milliseconds]
SECONDS = {"nothing": 0.0, "fifty_milliseconds": 0.05}
WORKERS = 2


def parsl_config(folder: str) -> Any:
    from parsl.config import Config
    from parsl.executors import HighThroughputExecutor
    from parsl.providers import LocalProvider

    executor = HighThroughputExecutor(
        label="htex",
        address="127.0.0.1",
        max_workers_per_node=WORKERS,
        encrypted=False,
        provider=LocalProvider(init_blocks=1, max_blocks=1, worker_init=f"export PYTHONPATH={ROOT}"),
    )
    return Config(executors=[executor], strategy="none", run_dir=folder, usage_tracking=0, initialize_logging=False)


@contextmanager
def our_pool(folder: str) -> Iterator[Any]:
    with PipeQueues() as queues:
        yield from served(queues, LocalTaskServer(METHODS, queues, num_workers=WORKERS))


@contextmanager
def our_parsl(folder: str) -> Iterator[Any]:
    with PipeQueues() as queues:
        yield from served(queues, ParslTaskServer(METHODS, queues, parsl_config(folder)))


@contextmanager
def our_directory(folder: str) -> Iterator[Any]:
    queues = MailboxQueues(folder, poll_interval=0.01)
    yield from served(queues, MailboxTaskServer(METHODS, queues, learner_id="node-0", slots=WORKERS, isolation="thread"))


@contextmanager
def our_bucket(folder: str) -> Iterator[Any]:
    with S3Server(folder) as s3:
        os.environ.update(s3.env)
        queues = MailboxQueues(s3.url("steering"), poll_interval=0.05)
        yield from served(queues, MailboxTaskServer(METHODS, queues, learner_id="node-0", slots=WORKERS, isolation="thread"))


@contextmanager
def colmena_parsl(folder: str) -> Iterator[Any]:
    from colmena.queue.python import PipeQueues as ColmenaPipeQueues
    from colmena.task_server.parsl import ParslTaskServer as ColmenaParslTaskServer

    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))  # Parsl looks for its helpers there
    queues = ColmenaPipeQueues()
    yield from served(queues, ColmenaParslTaskServer(METHODS, queues, parsl_config(folder)))


def served(queues: Any, server: Any) -> Iterator[Any]:
    server.start()
    try:
        yield queues
    finally:
        queues.send_kill_signal()
        server.join()


PLACES: dict[str, Callable[[str], Any]] = {
    "PipeQueues + LocalTaskServer": our_pool,
    "MailboxQueues in a directory, poll 10 ms": our_directory,
    "MailboxQueues on S3, poll 50 ms": our_bucket,
    "PipeQueues + ParslTaskServer": our_parsl,
    "Colmena: PipeQueues + ParslTaskServer": colmena_parsl,
}


def one_by_one(queues: Any, method: str, count: int) -> dict[str, float]:
    """Milliseconds that a task takes longer than its function, each sent when the last has come back."""
    added = []
    for _ in range(count):
        began = time.perf_counter()
        queues.send_inputs(method=method)
        result = queues.get_result()
        added.append(1e3 * (time.perf_counter() - began - (result.time.running or 0.0)))
        assert result.success, result.failure_info
    return {"median_ms": statistics.median(added), "p95_ms": percentile(added, 95) or 0.0}


def all_at_once(queues: Any, method: str, count: int) -> dict[str, float]:
    """Tasks a second, and how busy the workers were with the functions themselves."""
    began = time.perf_counter()
    for _ in range(count):
        queues.send_inputs(method=method)
    for _ in range(count):
        assert queues.get_result().success
    seconds = time.perf_counter() - began
    return {"tasks_per_s": count / seconds, "busy": SECONDS[method] * count / WORKERS / seconds}


def requests_per_task(folder: str, count: int) -> float:
    """Requests to a real S3 server over the life of a task, ``count`` of them in one campaign; its servers included."""
    import threading

    with S3Server(folder) as s3:
        os.environ.update(s3.env)
        box = CountingMailbox(open_mailbox(s3.url("steering")))
        queues = MailboxQueues(box, poll_interval=0.25)
        server = MailboxTaskServer(METHODS, queues, learner_id="node-0", isolation="thread")
        thread = threading.Thread(target=server.run)
        thread.start()
        for _ in range(count):
            queues.send_inputs(method="nothing")
        for _ in range(count):
            assert queues.get_result().success
        spent = sum(box.usage.requests.values())
        server.stop()
        thread.join()
    return spent / count


def measure(place: Callable[[str], Any], count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, place(folder) as queues:
        one_by_one(queues, "nothing", 3)  # everything is up
        return {
            "one_by_one": {method: one_by_one(queues, method, count) for method in SECONDS},
            "all_at_once": {method: all_at_once(queues, method, count) for method in SECONDS},
            "load": os.getloadavg()[0],
        }


def best(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure, the round that was disturbed least."""
    return {
        "one_by_one": {m: min((r["one_by_one"][m] for r in rounds), key=lambda figure: figure["median_ms"]) for m in SECONDS},
        "all_at_once": {m: max((r["all_at_once"][m] for r in rounds), key=lambda figure: figure["tasks_per_s"]) for m in SECONDS},
    }


def table(found: dict[str, Any]) -> str:
    at_once = f"{found['tasks']} at once, 2 workers"
    lines = [
        f"{'':42}{'added latency of a task, ms (median, p95)':>44}{at_once:>30}",
        f"{'':42}{'no-op':>22}{'50 ms':>22}{'no-op, tasks/s':>18}{'50 ms, busy':>12}",
    ]
    for name, rounds in found["places"].items():
        figures = best(rounds)
        single, batch = figures["one_by_one"], figures["all_at_once"]
        cells = "".join(f"{single[m]['median_ms']:.2f}, {single[m]['p95_ms']:.2f}".rjust(22) for m in SECONDS)
        lines.append(f"{name:42}{cells}{batch['nothing']['tasks_per_s']:>18.0f}{batch['fifty_milliseconds']['busy']:>12.0%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100, help="tasks of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="times that every place has its turn; the best of each figure counts")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "steering.json")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine.describe(), "revision": machine.revision(), "tasks": options.tasks}
    found["places"] = {name: [] for name in PLACES}
    for number in range(options.rounds):  # in turn, so that a busy minute of the machine does not hit one place alone
        for name, place in PLACES.items():
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            found["places"][name].append(measure(place, options.tasks))
    with tempfile.TemporaryDirectory() as folder:
        found["requests_per_task_on_s3"] = requests_per_task(folder, options.tasks)
    loads = [one["load"] for rounds in found["places"].values() for one in rounds]
    print(table(found))
    print(f"\nBest of {options.rounds} rounds; load of the machine {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} cores.")
    print(f"Requests to S3 over the life of a task, Thinker and server together: {found['requests_per_task_on_s3']:.1f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
