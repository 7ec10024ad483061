"""Node processes, their store and the proxy between them, and how each incident befalls them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gradientmail_torch import keys
from gradientmail_torch.clock import SYSTEM_CLOCK
from gradientmail_torch.errors import MailboxUnavailable
from gradientmail_torch.mailbox import Mailbox, open_mailbox
from gradientmail_torch.messages import LifeRecord, read
from gradientmail_torch.testing import Fault, FaultProxy, S3Server
from gradientmail_torch.testing.proxy import Request
from tests.chaos.schedule import Incident, Plan

ROOT = Path(__file__).parents[2]
FAILING_SHARE = 0.3
SLOW_BYTES_PER_S = 125_000.0  # 1 Mbit/s
DISK_MIB = 96
EXPECTED_ENDS = ("LearnerFenced", "LearnerIdInUse", "MailboxUnavailable", "OutcomeUnknown", "S3ServerFailed")
"""With these a node may end, and whatever restarts nodes restarts it: a name that is taken, a store that is away at the start."""


@dataclass
class Life:
    """One process of a node."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    generation: int = 0
    killed_at: float | None = None
    ended_by: str = ""
    """The error that it ended with; empty for one that ran to its end, or was killed."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def trains(self) -> bool:
        return any(event["event"] == "step" for event in self.events)

    @property
    def end(self) -> dict[str, Any] | None:
        return next((event for event in self.events if event["event"] == "end"), None)

    @property
    def steps(self) -> int:
        return next((int(event["steps"]) for event in reversed(self.events) if event["event"] == "step"), 0)

    @property
    def samples(self) -> int:
        return next((int(event["samples"]) for event in reversed(self.events) if event["event"] == "step"), 0)


class Node:
    """A machine: its processes come one after the other under one name."""

    def __init__(self, name: str, directory: Path, command: Callable[[str, Path], list[str]], env: dict[str, str]) -> None:
        self.name = name
        self.lives: list[Life] = []
        self._directory = directory
        self._command = command
        self._env = env
        self._events_file = directory / f"{name}.jsonl"
        self._read = 0

    @property
    def life(self) -> Life:
        """The newest process that lives, or the last one: of two that live, the older is on its way out."""
        return next((life for life in reversed(self.lives) if life.alive), self.lives[-1])

    @property
    def trains(self) -> bool:
        return any(life.alive and life.trains for life in self.lives)

    def start(self) -> Life:
        log = self._directory / f"{self.name}-{len(self.lives) + 1}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._command(self.name, self._events_file), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=self._env
            )
        self.lives.append(Life(self.name, process, log))
        return self.life

    def look(self) -> None:
        """Take in what its processes have reported, and how they have ended."""
        if self._events_file.exists():
            with self._events_file.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        event = json.loads(line)
                        for life in self.lives:
                            if life.process.pid == event["pid"]:
                                life.events.append(event)
        for life in self.lives:
            if not life.alive and life.process.returncode != 0 and life.killed_at is None and not life.ended_by:
                life.ended_by = last_error(life.log)


def last_error(log: Path) -> str:
    """The last line of a traceback in a process's output, or of the output."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line.split(":")[0] or line.startswith("gradientmail_torch.errors.")]
    return (errors or lines or ["ended without a word"])[-1][:500]


class Cluster:
    """Use as a context manager; leaves no process, mount or thread behind."""

    def __init__(self, plan: Plan, directory: Path, *, step_s: float) -> None:
        self.plan = plan
        self.directory = directory
        self.stop_file = directory / "stop"
        self.nodes: dict[str, Node] = {}
        self.takeovers: set[str] = set()
        """Keys of second and later claims of a round."""
        self.created: Counter[str] = Counter()
        """How often the store has said yes to the creation of each object, where a proxy is there to hear it."""
        self.notes: list[str] = []
        self._step_s = step_s
        self._rng = random.Random(f"faults {plan.seed}")
        self._stack = contextlib.ExitStack()
        self._seen_generations: dict[tuple[str, int], int] = {}
        self._restarting: threading.Thread | None = None
        self._stopped: dict[str, Life] = {}

    def __enter__(self) -> Cluster:
        self.directory.mkdir(parents=True)
        with self._stack:
            url, env = self._store_s3() if self.plan.store == "s3" else self._store_directory()
            self._stack.callback(self._end_processes)
            for name in self.plan.names:
                self.nodes[name] = Node(name, self.directory, lambda name, events: self._command(url, name, events), env)
                self.nodes[name].start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _store_s3(self) -> tuple[str, dict[str, str]]:
        self.server = self._stack.enter_context(S3Server(self.directory / "server"))
        self.proxy = self._stack.enter_context(FaultProxy("127.0.0.1", urlsplit(self.server.endpoint_url).port or 0))
        self.proxy.answered = self._heard
        for name, value in self.server.env.items():
            self._stack.enter_context(_environment(name, value))
        self.mailbox: Mailbox = open_mailbox(self.server.url("run"))
        url = f"s3://{self.server.bucket}/run?endpoint_url={self.proxy.endpoint_url}"
        return url, {**_plain_environment(), **self.server.env}

    def _store_directory(self) -> tuple[str, dict[str, str]]:
        self.disk = self.directory / "disk"
        self.disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(self.disk)], capture_output=True)
        if mounted.returncode == 0:
            self._stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)
        else:
            self.notes.append("no disk is filled: mounting one takes root")
        self._can_fill = mounted.returncode == 0
        self.mailbox = open_mailbox(str(self.disk / "run"))
        return str(self.disk / "run"), _plain_environment()

    def _command(self, url: str, name: str, events: Path) -> list[str]:
        options = {"mailbox": url, "learner-id": name, "parties": self.plan.nodes, "events": events, "stop": self.stop_file,
                   "lease": self.plan.lease_s, "step-seconds": self._step_s}  # fmt: skip
        return [sys.executable, "-m", "tests.chaos.node", *(f"--{option}={value}" for option, value in options.items())]

    def _end_processes(self) -> None:
        if self._restarting is not None:
            self._restarting.join()
        for node in self.nodes.values():
            for life in node.lives:
                if life.alive:
                    life.process.kill()  # also one that is suspended
                life.process.wait()

    def _heard(self, request: Request, status: int) -> None:
        if request.conditional and request.method == "PUT" and status == 200:
            self.created[request.path.split("?")[0]] += 1

    @property
    def lives(self) -> list[Life]:
        return [life for node in self.nodes.values() for life in node.lives]

    # --- watching ------------------------------------------------------------------------------------

    def look(self) -> None:
        for node in self.nodes.values():
            node.look()

    def look_into_the_mailbox(self) -> None:
        """Directly, not through the proxy, and without patience: the store may be away."""
        with contextlib.suppress(MailboxUnavailable):
            mailbox = self.mailbox.inner  # type: ignore[attr-defined]
            self.takeovers |= {key for key in mailbox.list("claims/") if not key.endswith("/000001")}
            self._find_generations(mailbox)

    def _find_generations(self, mailbox: Mailbox) -> None:
        """Which life of its name each process is: a life says which process it is."""
        for node in self.nodes.values():
            if all(life.generation for life in node.lives):
                continue
            for key in mailbox.list(keys.learner_lives(node.name)):
                generation = keys.parse_life(key).generation
                if (node.name, generation) not in self._seen_generations:
                    record = read(mailbox, LifeRecord, key)
                    self._seen_generations[node.name, generation] = record.pid if record else 0
                for life in node.lives:
                    if life.process.pid == self._seen_generations[node.name, generation]:
                        life.generation = generation

    # --- what befalls it ------------------------------------------------------------------------------

    def begin(self, incident: Incident) -> None:
        match incident.kind:
            case "kill":
                self._kill(self.nodes[incident.node].life)
            case "suspend" | "usurp":
                self._stopped[incident.node] = life = self.nodes[incident.node].life
                life.process.send_signal(signal.SIGSTOP)
                if incident.kind == "usurp":
                    self.nodes[incident.node].start()
            case "outage":
                self.proxy.down = True
            case "failing":
                self.proxy.fault = lambda request: self._rng.choice(list(Fault)) if self._rng.random() < FAILING_SHARE else None
            case "slow":
                self.proxy.bytes_per_s = SLOW_BYTES_PER_S
            case "server restart":
                self.server.stop()
            case "full disk" if self._can_fill:
                with contextlib.suppress(OSError), (self.disk / "ballast").open("wb") as file:
                    while True:
                        file.write(bytes(1 << 16))

    def may_end(self, incident: Incident) -> bool:
        """Whether what ends the incident can be done now."""
        if incident.kind == "server restart":  # which may take a while, and other things happen meanwhile
            if self._restarting is None:
                self._restarting = threading.Thread(target=self.server.restart, name="server restart")
                self._restarting.start()
            return not self._restarting.is_alive()
        if incident.kind != "usurp":
            return True
        newer = self.nodes[incident.node].lives[-1]
        return newer.generation > 0 or not newer.alive  # else the old one would come back to its name before it is taken

    def finish(self, incident: Incident) -> None:
        node = self.nodes.get(incident.node)
        match incident.kind:
            case "kill":
                assert node is not None
                if not node.life.alive:
                    node.start()
            case "suspend" | "usurp":
                self._stopped.pop(incident.node).process.send_signal(signal.SIGCONT)
            case "outage":
                self.proxy.down = False
            case "failing":
                self.proxy.fault = lambda request: None
            case "slow":
                self.proxy.bytes_per_s = float("inf")
            case "server restart":
                assert self._restarting is not None
                self._restarting.join()
                self._restarting = None
            case "full disk" if self._can_fill:
                (self.disk / "ballast").unlink(missing_ok=True)

    def _kill(self, life: Life) -> None:
        life.killed_at = time.time()
        life.process.kill()
        life.process.wait()

    def restart_the_fallen(self) -> None:
        """What whoever runs the nodes would do."""
        for node in self.nodes.values():
            last = node.lives[-1]
            if not node.life.alive and last.killed_at is None and last.end is None:
                node.start()

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        while not condition():
            if SYSTEM_CLOCK.monotonic() > deadline:
                return False
            SYSTEM_CLOCK.sleep(0.2)
            self.look()
        return True


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _plain_environment() -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "GRADIENTMAIL_", "COV_"))}
    return {**plain, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}


def fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    return directory
