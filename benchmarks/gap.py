"""What training in nodes costs: one process, three nodes and two processes of DDP on the same number of tokens.

``python -m benchmarks.gap [--steps N]`` trains the demo's model with Lightning, three seeds each, and prints the
validation losses and the gap to one process. One process makes a step for each 16 samples; three nodes make them
side by side, so each of their commits stands for three of its steps, and DDP's for two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).parent.parent / "examples" / "train.py"
SEEDS = (1, 2, 3)
NODES = 3


def start(seed: int, events: Path, *options: str, processes: int = 1) -> subprocess.Popen[bytes]:
    launcher = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *launcher, str(TRAIN), "--quiet", "--seed", str(seed), "--events", str(events), *options]
    with events.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def loss(process: subprocess.Popen[bytes], events: Path) -> float:
    """The validation loss that a process reports at its end."""
    if process.wait():
        raise SystemExit(events.with_suffix(".log").read_text()[-3000:])
    ends = [event for event in map(json.loads, events.read_text().splitlines()) if event["event"] == "end"]
    return float(ends[-1]["val_loss"])


def one_process(seed: int, steps: int, out: Path) -> float:
    return loss(start(seed, out / "one.jsonl", "--steps", str(NODES * steps)), out / "one.jsonl")


def three_nodes(seed: int, steps: int, out: Path) -> float:
    shared = ["--mailbox", str(out / "mailbox"), "--steps", str(steps), "--start-parties", str(NODES), "--done-parties", str(NODES)]
    files = [out / f"node-{number}.jsonl" for number in range(NODES)]
    processes = [start(seed, file, "--learner-id", file.stem, *shared) for file in files]
    losses = {loss(process, file) for process, file in zip(processes, files, strict=True)}
    (same,) = losses  # all nodes score the same parameters
    return same


def two_of_ddp(seed: int, steps: int, out: Path) -> float:
    return loss(start(seed, out / "ddp.jsonl", "--steps", str(NODES * steps // 2), processes=2), out / "ddp.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each of the three nodes")
    steps = parser.parse_args().steps
    found: dict[str, list[float]] = {}
    for method in (one_process, three_nodes, two_of_ddp):
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as out:
                found.setdefault(method.__name__, []).append(method(seed, steps, Path(out)))
            print(f"{method.__name__:12} seed {seed}: {found[method.__name__][-1]:.4f}", flush=True)
    base = statistics.mean(found["one_process"])
    for name, losses in found.items():
        spread = statistics.stdev(losses)
        print(f"{name:12} {statistics.mean(losses):.4f} ± {spread:.4f}, gap to one process {statistics.mean(losses) - base:+.4f}")


if __name__ == "__main__":
    main()
