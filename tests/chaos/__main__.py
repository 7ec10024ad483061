"""The command: a quiet run, the soak, and a report of both."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from tests.chaos import report, soak
from tests.chaos.schedule import Plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Node processes, a store, and everything that goes wrong.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--store", choices=["s3", "directory"], default="s3")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--quiet-seconds", type=float, default=60.0, help="of the run to compare with; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("out/chaos"))
    options = parser.parse_args()
    plan = Plan(seed=options.seed, seconds=options.seconds, store=options.store, nodes=options.nodes)
    directory = options.out / f"{plan.store}-{plan.seed}"
    quiet = None
    if options.quiet_seconds:
        quiet = soak.run(replace(plan, seconds=options.quiet_seconds), directory.with_name(f"{directory.name}-quiet"), incidents=())
    outcome = soak.run(plan, directory)
    found = report.write(outcome, quiet, directory)
    print(report.text(found))
    print(f"  in                        {directory}/report.json, report.png")
    return 1 if found["problems"] or (quiet is not None and quiet.problems) else 0


if __name__ == "__main__":
    sys.exit(main())
