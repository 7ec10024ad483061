"""``python -m benchmarks COMMAND``; each says with ``--help`` what it takes."""

from __future__ import annotations

import argparse
import json


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Ours and its peers on the same work.")
    commands = parser.add_subparsers(dest="command", required=True)
    everything = commands.add_parser("all", help="all races that are missing, then the report")
    everything.add_argument("parts", nargs="*", help="pace, loss, incidents; all unless given")
    everything.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a quiet machine before each")
    everything.add_argument("--again", action="store_true", help="also what has been run")
    commands.add_parser("report", help="tables and plots from what has been run")
    environments = commands.add_parser("environments", help="make the environments of the peers")
    environments.add_argument("names", nargs="*", help="all unless given")
    single = commands.add_parser("race", help="one method, one link, one scenario")
    single.add_argument("method", nargs="?")
    single.add_argument("--link", default="unlimited")
    single.add_argument("--scenario", default="steady")
    single.add_argument("--steps", type=int, default=300, help="of each node")
    single.add_argument("--seed", type=int, default=0)
    single.add_argument("--limit", type=float, default=1800.0, help="seconds after which it is given up")
    single.add_argument("--plan", type=json.loads, help="all of it, as JSON")
    tables = commands.add_parser("convergence", help="losses by setting, on a simulated cluster")
    tables.add_argument("tables", nargs="*", help="all unless given")
    tables.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    tables.add_argument("--jobs", type=int, default=1, help="trainings at the same time, one core each")
    tables.add_argument("--rows", default="", help="only those that this regular expression is found in")
    one = commands.add_parser("train", help="one row of a table of convergence")
    one.add_argument("table")
    one.add_argument("row")
    one.add_argument("seed", type=int)
    micro = commands.add_parser("micro", help="parts by themselves")
    micro.add_argument("names", nargs="*", help="all unless given: merging, formats, transfer, step, start, memory")
    scale = commands.add_parser("scale", help="cost and speed by number of nodes, on a simulated cluster; then docs/scale.md")
    scale.add_argument("--nodes", type=int, nargs="*", default=[4, 16, 64], help="up to 1,024; none only writes the document")
    scale.add_argument("--latencies", type=float, nargs="+", default=[0.02, 0.2], help="of the store, seconds")
    scale.add_argument("--links", nargs="+", default=["100mbit", "1gbit", "10gbit"], choices=["100mbit", "1gbit", "10gbit"])
    scale.add_argument("--cycles", type=float, default=2.0, help="that are counted")
    scale.add_argument("--after", type=float, default=1.0, help="cycles that pass before")
    scale.add_argument("--label", default="now", help="of the rows")
    scale.add_argument("--again", action="store_true", help="also what has been run")
    commands.add_parser("gpu", help="what holds on a CUDA device")
    options = parser.parse_args()
    match options.command:
        case "all":
            from benchmarks import bench, report

            bench.run(options.parts, patience_s=options.patience, again=options.again)
            report.write()
        case "report":
            from benchmarks import report

            report.write()
        case "environments":
            from benchmarks.methods import make_environments

            make_environments(options.names)
        case "race":
            from benchmarks import figures, race

            given = {name: getattr(options, name) for name in ("method", "link", "scenario", "steps", "seed")}
            plan = race.Plan(**(options.plan or given))
            race.start(plan, options.limit)
            if options.plan is None:
                print(json.dumps(figures.of(plan.directory), indent=1))
        case "convergence":
            from benchmarks import convergence

            convergence.run_all(options.tables, options.seeds, options.jobs, options.rows)
        case "train":
            from benchmarks import convergence

            convergence.train(options.table, options.row, options.seed)
        case "micro":
            from benchmarks import micro

            print(json.dumps(micro.run(options.names), indent=1))
        case "scale":
            from benchmarks import scale as scales
            from benchmarks import scale_report

            wanted = scales.points(options.nodes, options.latencies, options.links, cycles=options.cycles, after=options.after)
            scales.run_all(wanted, label=options.label, again=options.again)
            scale_report.write()
        case "gpu":
            from benchmarks import gpu_checks

            print(json.dumps(gpu_checks.run(), indent=1))


if __name__ == "__main__":
    main()
