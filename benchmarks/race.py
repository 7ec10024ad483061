"""One race: a method's nodes on one machine, over one link, through one scenario; leaves a file of events for each.

Scenarios: ``steady``; ``join``, the last node comes late; ``kill``, it gets SIGKILL and comes back; ``freeze``, it gets
SIGSTOP for 30 seconds; ``outage``, what the nodes meet at is away for 20 seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import link, machine
from benchmarks.methods import METHODS, ROOT, Method

OUT = ROOT / "out" / "benchmarks"
SCENARIOS = ("steady", "join", "kill", "freeze", "outage")


@dataclass(frozen=True, kw_only=True)
class Plan:
    method: str
    scenario: str = "steady"
    link: str = "unlimited"
    steps: int = 300
    """Of each node, in the steady scenario."""
    seed: int = 0
    sync_every: int = 20
    before_s: float = 30.0
    """From the first step to what happens."""
    away_s: float = 20.0
    """How long a node, or what the nodes meet at, is away."""
    after_s: float = 40.0
    """From its return to the end."""

    @property
    def name(self) -> str:
        return f"{self.method.replace('/', '-')}.{self.link}.{self.scenario}.{self.steps}.{self.seed}"

    @property
    def directory(self) -> Path:
        return OUT / self.name


class Race:
    """Runs in the network that it is to be measured in; see :mod:`benchmarks.link`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.method: Method = METHODS[plan.method]
        shutil.rmtree(plan.directory, ignore_errors=True)
        plan.directory.mkdir(parents=True)
        self._log = (plan.directory / "race.jsonl").open("w", buffering=1)
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._sessions = {os.getpid()}
        self._services: dict[str, subprocess.Popen[bytes]] = {}
        self._server: Any = None
        self._address = ""
        self._port: int | None = None
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
        self._until = float("inf")

    def run(self, limit_s: float) -> None:
        plan = self.plan
        self._note("plan", **asdict(plan), nodes=self.method.nodes, load=machine.mapping_of_load())
        if link.isolated():
            link.bring_up()
        try:
            self._open_meeting()
            if rate := link.LINKS[plan.link]:
                link.limit(rate, self._port)
            counted = self._port if link.LINKS[plan.link] else None
            sampler = machine.Sampler(self._sessions, lambda: link.bytes_sent(counted), self._note)
            try:
                getattr(self, f"_{plan.scenario}")()
                self._wait_for_ends(limit_s)
            finally:
                sampler.stop()
        finally:
            self._end_all()

    # --- scenarios -------------------------------------------------------------------------------------

    def _steady(self) -> None:
        for node in range(self.method.nodes):
            self._launch(node)

    def _join(self) -> None:
        self._until = time.monotonic() + 30 + self.plan.before_s + self.plan.after_s
        late = self.method.nodes - 1
        for node in range(late):
            self._launch(node)
        self._await_first_steps(range(late))
        time.sleep(self.plan.before_s)
        self._launch(late, latecomer=True)

    def _kill(self) -> None:
        victim = self._train_together()
        self._note("killed", node=victim)
        os.killpg(self._nodes[victim].pid, signal.SIGKILL)
        self._nodes.pop(victim).wait()
        time.sleep(self.plan.away_s)
        if all(process.poll() is None for process in self._nodes.values()):
            self._launch(victim, latecomer=True)

    def _freeze(self) -> None:
        victim = self._train_together()
        self._note("frozen", node=victim)
        os.killpg(self._nodes[victim].pid, signal.SIGSTOP)
        time.sleep(30.0)
        self._note("thawed", node=victim)
        os.killpg(self._nodes[victim].pid, signal.SIGCONT)

    def _outage(self) -> None:
        self._train_together()
        self._note("outage")
        if self._server is not None:
            self._server.stop()
            time.sleep(self.plan.away_s)
            self._server.restart()
            self._sessions.add(self._server.pid)
        elif "lighthouse" in self._services:
            os.killpg(self._services["lighthouse"].pid, signal.SIGKILL)
            self._services.pop("lighthouse").wait()
            time.sleep(self.plan.away_s)
            self._start_lighthouse()
        self._note("restored")

    def _train_together(self) -> int:
        """All nodes, until a while after their first steps; returns who is the victim."""
        self._until = time.monotonic() + 30 + self.plan.before_s + 30.0 + self.plan.after_s
        for node in range(self.method.nodes):
            self._launch(node)
        self._await_first_steps(range(self.method.nodes))
        time.sleep(self.plan.before_s)
        return self.method.nodes - 1

    # --- processes -------------------------------------------------------------------------------------

    def _open_meeting(self) -> None:
        match self.method.meeting:
            case "store":
                self._address = f"127.0.0.1:{_free_port()}"
            case "lighthouse":
                self._address = f"localhost:{_free_port()}"
                self._start_lighthouse()
            case "file":
                self._address = str(self.plan.directory / "meeting")
            case "mailbox":
                from gradientmail_torch.testing.s3_server import S3Server

                self._server = S3Server(self.plan.directory / "s3").start()
                self._sessions.add(self._server.pid)
                self._address = self._server.url("run")
                self._port = int(self._server.endpoint_url.rpartition(":")[2])
                self._environment |= self._server.env

    def _start_lighthouse(self) -> None:
        program = self.method.python.parent / "torchft_lighthouse"
        bind = f"[::]:{self._address.rpartition(':')[2]}"
        options = ["--bind", bind, "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        self._services["lighthouse"] = self._start([str(program), *options], "lighthouse.log")
        time.sleep(1.0)

    def _launch(self, node: int, *, latecomer: bool = False) -> None:
        plan, method = self.plan, self.method
        steps = plan.steps if plan.scenario == "steady" else 100_000
        command = [
            *(str(method.python), "-m", f"benchmarks.nodes.{method.program}"),
            *("--node", str(node), "--nodes", str(method.nodes), "--present", str(method.nodes - (plan.scenario == "join"))),
            *("--steps", str(steps), "--seed", str(plan.seed)),
            *("--sync-every", str(plan.sync_every), "--settings", json.dumps(dict(method.settings)), "--address", self._address),
            *("--events", str(self._events_of(node)), "--until", str(self._until), *(["--latecomer"] if latecomer else [])),
        ]
        self._note("launched", node=node, latecomer=latecomer)
        self._nodes[node] = self._start(command, f"node-{node}.log")

    def _start(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        with (self.plan.directory / log).open("ab") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._sessions.add(process.pid)
        return process

    def _await_first_steps(self, nodes: range) -> None:
        self._await(lambda: all(b'"step"' in _read(self._events_of(node)) for node in nodes), 120.0)

    def _await(self, holds: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._nodes.values()):
                raise SystemExit(f"{self.plan.name}: the nodes did not begin to train; see {self.plan.directory}")
            time.sleep(0.1)

    def _wait_for_ends(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        left = dict(self._nodes)
        while left:
            for node, process in [*left.items()]:
                if process.poll() is not None:
                    self._note("exited", node=node, code=process.returncode)
                    del left[node]
            if time.monotonic() > deadline:
                self._note("gave up", nodes=[*left], after_s=limit_s)
                return
            time.sleep(0.1)

    def _end_all(self) -> None:
        for process in (*self._nodes.values(), *self._services.values()):
            for kind in (signal.SIGCONT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, kind)
                except ProcessLookupError:
                    pass
            process.wait()
        if self._server is not None:
            self._server.stop()
            shutil.rmtree(self.plan.directory / "s3", ignore_errors=True)
        self._log.close()

    def _events_of(self, node: int) -> Path:
        return self.plan.directory / f"node-{node}.jsonl"

    def _note(self, event: str, **figures: Any) -> None:
        self._log.write(json.dumps({"event": event, "at": time.monotonic(), **figures}) + "\n")


def start(plan: Plan, limit_s: float) -> None:
    """Run a race in a network of its own; on the machine's loopback, at full speed, where none can be made."""
    if missing := METHODS[plan.method].missing():
        raise SystemExit(f"{plan.name}: {missing}")
    problem = "" if link.isolated() else link.can_isolate()
    if problem and link.LINKS[plan.link]:
        raise SystemExit(f"{plan.name}: a limited link needs a network of its own ({problem}): run it as root, with iproute2")
    if problem:
        print(f"{plan.name}: on this machine's own loopback, since a network of its own cannot be made ({problem})")
    if problem or link.isolated():
        Race(plan).run(limit_s)
        return
    command, environment = link.command(["race", "--plan", json.dumps(asdict(plan)), "--limit", str(limit_s)])
    subprocess.run(command, env=environment, cwd=ROOT, check=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        return int(held.getsockname()[1])


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
