"""``python -m benchmarks COMMAND``; each says with ``--help`` what it takes."""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours and its peers on the same work.")
    commands = parser.add_subparsers(dest="command", required=True)
    tables = commands.add_parser("convergence", help="losses by setting, on a simulated cluster")
    tables.add_argument("tables", nargs="*", help="all unless given")
    tables.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    tables.add_argument("--jobs", type=int, default=1, help="trainings at the same time, one core each")
    one = commands.add_parser("train", help="one row of a table of convergence")
    one.add_argument("table")
    one.add_argument("row")
    one.add_argument("seed", type=int)
    options = parser.parse_args()
    match options.command:
        case "convergence":
            from benchmarks import convergence

            convergence.run_all(options.tables, options.seeds, options.jobs)
        case "train":
            from benchmarks import convergence

            convergence.train(options.table, options.row, options.seed)


if __name__ == "__main__":
    main()
